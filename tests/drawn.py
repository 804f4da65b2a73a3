"""Elements of drawn SVG, as tests read them."""

from __future__ import annotations

import re
from typing import Final
from xml.etree.ElementTree import Element, fromstring

SVG: Final = "{http://www.w3.org/2000/svg}"


def parse(svg: str) -> Element:
    """The root of a picture in which every number is finite."""
    assert not re.search("(?<![a-z])(nan|inf)(?![a-z])", svg)
    root = fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return root


def texts(root: Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]
