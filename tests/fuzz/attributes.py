"""Attributes and operands of ONNX's ops that no code reads.

    python -m tests.fuzz attributes            # what is not read, refused or harmless
    python -m tests.fuzz attributes --freeze   # write the table of all from onnxruntime's schemas

`attributes.txt` lists the attributes and operands of each supported op with attributes or several
operands, of all opsets, from the schemas of onnxruntime, which has those of `onnx` and its own. An
attribute is read if its name is in the code of the op's function, or of a function of `mlvm.onnx`
that this one calls; an operand if the function uses the parameter. All others are refused by the
table of ops (`only`, and the number of operands), or listed as harmless here. The defaults in the
code are compared with those of `onnx`.
"""

from __future__ import annotations

import ast
import dis
import inspect
import re
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from mlvm.onnx import ops as _fill_the_table  # noqa: F401
from mlvm.onnx import table
from mlvm.onnx.table import TABLE, OnnxOp
from tests.fuzz.command import parser_of

Row: TypeAlias = tuple[str, list[str], list[str]]
"""Name, attributes and operands of an op."""
FILE: Final = Path(__file__).with_suffix(".txt")
_BUILT: Final = (
    "base_values_as_tensor nodes_values_as_tensor class_weights_as_tensor target_weights_as_tensor "
    "class_treeids class_nodeids target_treeids target_nodeids target_ids target_weights "
    "fc1_expert_weight_bits fc2_expert_weight_bits fc3_expert_weight_bits"
)
_STRINGS: Final = "classes_strings default_string keys_strings values_strings"
HARMLESS: Final = {
    "*.accuracy_level": "a result may be more exact than asked for",
    "*.consumed_inputs": "a hint of opset 1 for in-place updates",
    "*.kernel_shape": "the shape of the weights",
    **dict.fromkeys(("*.nodes_hitrates", "*.nodes_hitrates_as_tensor"), "a hint"),
    **{f"*.{x}": "read by a built name" for x in _BUILT.split()},
    "*.stash_type": "a result may be more exact than asked for",
    "*.output_sequence": "of opset 1; an output that no node reads is not in the file",
    "Constant.value_floats": "read by the beginning of its name",
    "Constant.value_ints": "read by the beginning of its name",
    "Constant.value_string": "refused as a constant that is no number",
    "Constant.value_strings": "refused as a constant that is no number",
    "Dropout.seed": "what is dropped is random",
    "Gemm.broadcast": "of opset 6; operands are always broadcast",
    "*.chunk_size": "a hint",
    "Optional.type": "the type of what is absent",
    "QuantizeLinear.precision": "the division is computed in f32",
    "SequenceEmpty.dtype": "the type of no elements",
    "TfIdfVectorizer.pool_strings": "refused: pool_int64s is required",
    "TopK.sorted": "any order of the largest elements is allowed, also the sorted one",
    "Upsample.height_scale": "of opset 1, which is refused: scales is required",
    "Upsample.width_scale": "of opset 1, which is refused: scales is required",
    "ai.onnx.ml.LinearClassifier.classlabels_strings": "refused: classlabels_ints is required",
    "ai.onnx.ml.LinearClassifier.multi_class": "onnxruntime does not read it either",
    "ai.onnx.ml.FeatureVectorizer.inputdimensions": "the shapes of the operands",
    **{f"ai.onnx.ml.LabelEncoder.{x}": "strings are refused" for x in _STRINGS.split()},
    "ai.onnx.ml.TreeEnsembleClassifier.classlabels_strings": "refused: integers are required",
    "com.microsoft.Attention.rotary_embedding_dim": "of rotary embeddings, which are refused",
    "com.microsoft.BiasSoftmax.is_inner_broadcast": "numpy's rules broadcast both forms",
    "com.microsoft.DecoderMaskedMultiHeadAttention.output_qk": "the result is computed anyway",
    "com.microsoft.EmbedLayerNormalization.mask_index_type": "the result is computed anyway",
    **{f"*.{x}_norm_epsilon": "the operands of norms are refused" for x in ("k", "q", "qk")},
    "com.microsoft.QMoE.block_size": "the shape of the scales",
}
"""Attributes and operands that no code needs to read, and why."""


def schemas() -> dict[str, tuple[list[str], list[str]]]:
    """Return the attributes and operands of each supported op, from all versions of its schema."""
    from onnx import defs
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    found: dict[str, tuple[set[str], list[str]]] = {}
    for schema in (*defs.get_all_schemas_with_history(), *get_all_operator_schema()):
        name = f"{schema.domain}.{schema.name}".lstrip(".")
        if name in TABLE:
            attributes, operands = found.get(name, (set(), []))
            names = [each.name for each in schema.inputs]
            longest = names if len(names) > len(operands) else operands
            found[name] = attributes | {*schema.attributes}, longest
    return {name: (sorted(a), [*b]) for name, (a, b) in sorted(found.items())}


def freeze() -> None:
    lines = [
        f"{name}({', '.join(operands)}): {' '.join(attributes)}".rstrip()
        for name, (attributes, operands) in schemas().items()
        if attributes or len(operands) > 1
    ]
    FILE.write_text("\n".join([*lines, ""]))


def frozen() -> Iterator[Row]:
    """Yield each op's name, attributes and operands of the table."""
    for line in FILE.read_text().splitlines():
        head, _, attributes = line.partition("):")
        name, _, operands = head.partition("(")
        yield name, attributes.split(), [x for x in operands.split(", ") if x]


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a constant."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (tuple, list, frozenset, set)):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, dict):
        yield from _texts([*value, *value.values()])


def texts_read(function: Any) -> set[str]:
    """Return the texts in the code of a function, and of functions of `mlvm.onnx` that it uses."""
    texts: set[str] = set()
    seen: set[int] = set()

    def look_at(value: Any) -> None:
        value = getattr(value, "func", getattr(value, "__wrapped__", value))  # `partial`, caches
        if isinstance(value, types.FunctionType):
            if id(value.__code__) in seen or not value.__module__.startswith("mlvm.onnx"):
                return
            for cell in value.__closure__ or ():
                look_at(cell.cell_contents)
            look_in(value.__code__, value.__globals__)
        else:
            texts.update(_texts(value))

    def look_in(code: types.CodeType, names: dict[str, Any]) -> None:
        seen.add(id(code))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                look_in(constant, names)
            else:
                texts.update(_texts(constant))
        for name in code.co_names:
            look_at(names.get(name))

    for cell in function.__closure__ or ():
        look_at(cell.cell_contents)
    look_in(function.__code__, function.__globals__)
    return texts


def used_parameters(function: Any) -> set[str]:
    """Return the parameters that a function reads."""

    def read(code: types.CodeType) -> Iterator[str]:
        for instruction in dis.get_instructions(code):
            if instruction.opname.startswith("LOAD_"):
                yield from _texts(instruction.argval)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from read(constant)

    return {*read(function.__code__)}


def unread(rows: Iterable[Row] | None = None) -> list[str]:
    """Return what is neither read, nor refused, nor harmless: "Op.attribute" and "Op(operand)"."""
    found = []
    for name, attributes, operands in frozen() if rows is None else rows:
        op: OnnxOp = TABLE[name]
        texts = texts_read(op.run)
        texts |= {text for pack in op.packed.values() for text in texts_read(pack)}
        texts |= texts_read(table._as_before_7) if op.kind == "elementwise" else set()
        texts |= {*op.only, *" ".join(op.older.values()).split()}
        found += [f"{name}.{x}" for x in attributes if x not in texts]
        code = op.run.__code__
        parameters = code.co_varnames[1 : code.co_argcount]
        used = used_parameters(op.run)
        pairs = zip(operands, parameters, strict=False)
        found += [f"{name}({x})" for x, parameter in pairs if parameter not in used]
    return [x for x in found if x not in HARMLESS and f"*.{x.rpartition('.')[2]}" not in HARMLESS]


def other_defaults() -> list[str]:
    """Return the defaults in the code of ops that differ from onnx's schemas: "Op.attribute"."""
    from onnx import defs, helper

    found = []
    for schema in defs.get_all_schemas():
        name = f"{schema.domain}.{schema.name}".lstrip(".")
        code = inspect.getsource(TABLE[name].run) if name in TABLE else ""
        for attribute, each in schema.attributes.items():
            for text in re.findall(rf'at\.get\("{attribute}", ([^(),]+)\)', code):
                with suppress(ValueError, SyntaxError):  # a default that depends on the opset
                    own, value = (
                        ast.literal_eval(text),
                        helper.get_attribute_value(each.default_value),
                    )
                    own = np.float32(own) if isinstance(own, float) else own
                    value = value.decode() if isinstance(value, bytes) else value
                    if own != value and each.default_value.type:
                        found.append(f"{name}.{attribute}: {own} by default, not {value}")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__name__, __doc__)
    parser.add_argument("--freeze", action="store_true", help="write the table")
    options = parser.parse_args(argv)
    left = unread()
    if options.freeze:
        freeze()
    with suppress(ImportError):  # else those of the table
        left = unread([(name, *row) for name, row in schemas().items()]) + other_defaults()
    print("\n".join(left) or "all attributes and operands are read, refused or harmless")
    return int(bool(left))
