"""The manifests of `deploy/kubernetes` fit Kubernetes' schemas, and name what mlvm understands."""

from __future__ import annotations

from typing import Any

import pytest

from mlvm.parallel.launched import launched
from tests.brief import ROOT, cases

FOLDER = ROOT / "deploy" / "kubernetes"


def documents(name: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((FOLDER / name).read_text("utf-8")))


@cases("name", *sorted(path.name for path in FOLDER.iterdir()))
def test_manifests_are_valid(name: str) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for document in documents(name):
        validator.validate(document, "1.28", strict=True)


@cases("name", "job.yaml", "statefulset.yaml")
def test_pods_start_members(name: str) -> None:
    service, pods = documents(name)
    [container] = pods["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value", "2") for each in container["env"]}
    if pods["kind"] == "Job":
        variables["JOB_COMPLETION_INDEX"] = "2"  # as Kubernetes does
    size = pods["spec"].get("completions", pods["spec"].get("replicas"))
    member = launched(variables)
    assert (member.rank, member.size) == (2, size)
    assert member.address.host == f"{pods['metadata']['name']}-0.{service['metadata']['name']}"
    assert (
        service["spec"]["selector"].items()
        <= pods["spec"]["template"]["metadata"]["labels"].items()
    )
    assert container["command"][:3] == ["python", "-m", "models.train"]
