"""Declarations of the arguments of operations: the torch schema, and one refusal per declared property.

Each declared property of each argument and output is violated alone, in a call that is otherwise valid.
`describe` and the guard of a plan must refuse it, with an error that names an argument tied to it.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from traceback import format_exception
from typing import Any

import pytest
import torch

from gristmill.autotune.bound import fitting
from gristmill.autotune.verify import kernel_arguments
from gristmill.kernel_registry.argument_checks import Checks
from gristmill.kernel_registry.argument_functions import apart, matrix, rows, vectors
from gristmill.kernel_registry.argument_names import Shape, names_in
from gristmill.kernel_registry.arguments import CONTIGUOUS, ROWS, STRIDED, VECTORS, Scalar, Tensor, Weight
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.moe.permute import op as permute

REGISTRY = default_registry()
SCHEMAS = {
    "all_gather": ("Tensor x, str group, int world, Tensor(a!) out", ()),
    "all_to_all": ("Tensor x, str group, int world, Tensor(a!) out", ()),
    "all_reduce": ("Tensor(a!) x, str group, int world", ()),
    "all_reduce_add_rms_norm": (
        "Tensor x, Tensor(a!) residual, Tensor weight, float eps, str group, int world",
        ("out",),
    ),
    "combine": ("Tensor y, Tensor inverse, Tensor weights", ("out",)),
    "fused_add_rms_norm": ("Tensor x, Tensor(a!) residual, Tensor weight, float eps", ("out",)),
    "grouped_linear": (
        "Tensor x, Tensor[] weight, Tensor expert_offsets, Tensor? permutation=None, int top_k=1, "
        "bool silu_mul=False, int n=0, Tensor? bias=None, bool clamp=False, float alpha=1.702, float limit=7.0",
        ("out",),
    ),
    "grouped_topk": (
        "Tensor logits, int top_k, Tensor? bias=None, int n_group=1, int topk_group=1, "
        "str scoring='softmax', bool renormalize=True, float scale=1.0",
        ("weights", "ids"),
    ),
    "copy_blocks": (
        "Tensor source, Tensor(a!) cache, Tensor source_blocks, Tensor cache_blocks, Tensor factors",
        ("sums",),
    ),
    "layer_norm": (
        "Tensor x, Tensor weight, Tensor? bias=None, float eps=1e-05, Tensor(a!)? residual=None",
        ("out",),
    ),
    "linear": (
        "Tensor x, Tensor[] weight, Tensor? bias=None, Tensor? residual=None, bool silu_mul=False, "
        "int n=0, Tensor(w!)? workspace=None, Tensor? codes=None, Tensor? scales=None",
        ("out",),
    ),
    "linear_fp32": (
        "Tensor x, Tensor weight, Tensor? bias=None, Tensor(w!)? workspace=None",
        ("out",),
    ),
    "merge_attention_states": ("Tensor a, Tensor a_lse, Tensor b, Tensor b_lse", ("out", "lse")),
    "mla_attention": (
        "Tensor q, Tensor cache, Tensor block_table, Tensor query_start, Tensor seq_lens, "
        "int max_q, int max_ctx, float scale, int latent_dim=512, Tensor(a!)? lse=None, "
        "Tensor(w!)? workspace=None",
        ("out",),
    ),
    "moe": (
        "Tensor x, Tensor weights, Tensor ids, Tensor[] w13, Tensor[] w2, int inter=0, "
        "Tensor(w!)? workspace=None, Tensor? w13_bias=None, Tensor? w2_bias=None, bool clamp=False, "
        "float alpha=1.702, float limit=7.0, Tensor? codes=None, Tensor? scales=None, str activation='silu', bool gated=True, "
        "Tensor? expert_offsets=None, Tensor? permutation=None, Tensor? inverse=None",
        ("out",),
    ),
    "paged_attention": (
        "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor query_start, "
        "Tensor seq_lens, int max_q, int max_ctx, float scale, int window=0, Tensor? sinks=None, "
        "Tensor(a!)? lse=None, Tensor(w!)? workspace=None, Tensor? k_scale=None, Tensor? v_scale=None, float softcap=0.0",
        ("out",),
    ),
    "logprobs": (
        "Tensor logits, Tensor places, Tensor ids, int k=0, Tensor(w!)? workspace=None",
        ("logprobs", "tokens"),
    ),
    "permute": ("Tensor ids, int experts", ("expert_offsets", "permutation", "inverse")),
    "process_logits": (
        "Tensor logits, Tensor places, Tensor fed, Tensor slots, Tensor penalties, Tensor seen, Tensor bias, Tensor counted, "
        "Tensor barred, Tensor mask, Tensor mask_rows",
        ("out", "largest"),
    ),
    "qk_norm_rope_cache": (
        "Tensor qkv, Tensor? q_weight, Tensor? k_weight, float eps, Tensor positions, Tensor cos_sin, "
        "Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, bool interleaved=False, "
        "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None",
        ("q",),
    ),
    "reshape_and_cache": (
        "Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
        "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None",
        (),
    ),
    "reshape_and_cache_mla": ("Tensor latent, Tensor(a!) cache, Tensor slot_mapping", ()),
    "rms_norm": ("Tensor x, Tensor weight, float eps", ("out",)),
    "rms_norm_quant": (
        "Tensor x, Tensor(a!)? residual, Tensor weight, float eps, Tensor(b!) codes, Tensor(c!) scales, str format, "
        "Tensor(d!)? normed=None",
        (),
    ),
    "rotary_embedding": (
        "Tensor(a!) q, Tensor(b!)? k, Tensor positions, Tensor cos_sin, bool interleaved=False",
        (),
    ),
    "route": (
        "Tensor logits, int top_k, int local, int first=0, Tensor? bias=None, int n_group=1, int topk_group=1, "
        "str scoring='softmax', bool renormalize=True, float scale=1.0",
        ("weights", "ids", "expert_offsets", "permutation", "inverse"),
    ),
    "sample": (
        "Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, "
        "Tensor index, Tensor(w!)? workspace=None",
        ("ids",),
    ),
    "activation": ("Tensor x, str function", ("out",)),
    "gelu_and_mul": ("Tensor x, str approximate='none'", ("out",)),
    "silu_and_mul": ("Tensor x", ("out",)),
    "silu_and_mul_quant": ("Tensor x, Tensor(a!) codes, Tensor(b!) scales, str format", ()),
    "varlen_attention": (
        "Tensor q, Tensor k, Tensor v, Tensor query_start, Tensor context_start, int max_q, "
        "int max_ctx, float scale, Tensor(a!)? lse=None, int window_left=-1, int window_right=0",
        ("out",),
    ),
}
"""The schemas of the torch operators, (arguments, outputs), that callers and exported programs use."""

MORE = {
    "all_gather": "m=5,n=7,world=3",
    "all_to_all": "m=5,n=7,world=3",
    "all_reduce": "m=5,n=7,world=3",
    "all_reduce_add_rms_norm": "m=5,n=7,world=3",
    "paged_attention": "q_tokens=5,seqs=3,max_q=3,max_ctx=40,total_ctx=60,heads=4,kv_heads=2,head_dim=64,sinks=true,lse=true,"
    "kv=fp8,kv_scale=token",
    "mla_attention": "q_tokens=5,seqs=3,max_q=3,max_ctx=140,total_ctx=60,heads=4,lse=true",
    "varlen_attention": "q_tokens=5,seqs=3,max_q=3,max_ctx=40,total_ctx=60,heads=4,kv_heads=2,lse=true,window_left=5,window_right=3",
    "linear": "m=5,n=32,k=64,epilogue=bias+residual+silu_mul",
    "linear_fp32": "m=7,n=33,k=129,bias=true",
    "grouped_linear": "m=12,e=5,n=34,k=67,gather=2,epilogue=bias+silu_mul+clamp",
    "moe": "m=13,top_k=3,e=5,h=67,i=35,x=fp32,w=fp32,epilogue=w13_bias+w2_bias+clamp",
    "grouped_topk": "m=5,e=16,top_k=2,n_group=8,topk_group=2,scoring=sigmoid,bias=true",
    "layer_norm": "m=7,n=257,bias=true,residual=true",
    "route": "m=5,e=16,local=6,top_k=2,n_group=8,topk_group=2,scoring=sigmoid,bias=true",
    "qk_norm_rope_cache": "t=7,heads=4,kv_heads=2,head_dim=32,rot=24,norm=true,block_size=4,kv=fp8,kv_scale=token",
    "reshape_and_cache": "t=7,h=3,d=32,dv=24,block_size=4,kv=fp8,kv_scale=token",
    "rms_norm_quant": "m=7,n=257,residual=true,normed=true",
    "rotary_embedding": "t=5,hq=4,hk=2,d=64,rot=32",
}
"""Problems with every optional argument, for operations without such a small example."""
GIVEN = ("codes", "scales")
"""Arguments that go with quantized weights alone, which these calls do not have: tests/kernels/test_given_codes.py."""


def call_of(op: Op) -> tuple[Problem, list[Any]]:
    """Returns a problem with every argument and a valid call: dense weights in a list, outputs after the
    arguments."""
    sizes = [axis.name for axis in op.axes if axis.kind == "int" and axis.default != 0]
    texts = [MORE[op.name]] if op.name in MORE else op.examples
    problem = next(p for p in map(op.problem, texts) if all(p.integer(name) > 1 for name in sizes))
    arguments = op.inputs(problem, 0, "cpu")
    if op.name == "moe":
        arguments[-3:] = permute.reference(arguments[2], problem.integer("e"))
    if op.pack is not None:
        dense = next(k for k in REGISTRY.kernels_of(op.name) if k.layouts == ("dense_v1",))
        arguments = kernel_arguments(op, dense, arguments)
    outputs = [torch.empty(shape, dtype=dtype) for shape, dtype in op.like(*arguments)]
    return problem, [*arguments, *outputs]


def every_other(x: torch.Tensor) -> torch.Tensor:
    """Returns x with a last dimension that is not contiguous."""
    return x.new_empty((*x.shape[:-1], 2 * x.shape[-1]))[..., ::2].copy_(x)


def violations(op: Op, item: Tensor, x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yields (what, a tensor that violates one declared property, whether only a plan can notice)."""
    shape, names = Shape(item.shape), Checks(op)
    for place, size in shape.places():
        inside = set(names_in(size))
        # A change of this size alone makes another valid problem: a name that no other argument has absorbs it.
        unshared = item.name in names.shapes and bool(inside & names.only_in(item.name))
        if not unshared or inside & names.static:
            yield f"{size} longer", torch.cat([x, x.narrow(place, 0, 1)], place), unshared
            yield f"{size} shorter", x.narrow(place, 0, x.shape[place] - 1).contiguous(), unshared
    if shape.flat:
        yield "elements", x.reshape(-1)[:-1].clone(), False
    elif not shape.leading:
        yield "a dimension more", x[None], False
    yield "no dimension", x.reshape(-1)[0].clone(), False
    for dtype in (torch.float64, torch.int16):
        yield f"{dtype}", x.to(dtype), False
    if item.strides != STRIDED:
        yield "strides", every_other(x), False
    if item.strides == ROWS:
        yield "rows of two strides", x.new_empty(2, 3, *x.shape)[:, 0].copy_(x), False
    if item.strides == CONTIGUOUS and x.dim() > 1:
        yield "rows apart", x.new_empty(x.shape[0], 3, *x.shape[1:])[:, 1].copy_(x), False
    if item.mutable or item in op.returns:
        for place in range(x.dim()):
            if x.shape[place] > 1:
                yield f"dimension {place} overlaps", x.narrow(place, 0, 1).expand_as(x), False


def bad_scalars(op: Op, scalar: Scalar, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields numbers outside the declared bounds."""
    axis = Checks(op).axes.get(scalar.name)
    if scalar.minimum is not None:
        yield "below", scalar.minimum - 1
    elif scalar.kind == "int" and axis is not None and axis.minimum and not scalar.states:
        yield "below", axis.minimum - 1
    if scalar.maximum is not None:
        yield "above", 2**40
    if scalar.finite:
        yield "not finite", float("nan")
    if scalar.states:
        yield "another size", value + 1
    if axis is not None and axis.choices:
        yield "no choice", "nonsense"


def tied(op: Op, item: Tensor | Weight | Scalar) -> set[str]:
    """Returns the arguments that an error about `item` may name: itself, and those that share a size or a
    dtype with it."""
    items = [i for i in (*op.arguments, *op.returns) if isinstance(i, Tensor | Weight)]
    if isinstance(item, Scalar):
        return {item.name, *(i.name for i in items)}
    names = set(Checks(op).names_of(item.shape)) | {op.bucket}
    return (
        {item.name}
        | {
            i.name
            for i in items
            if names & {*Checks(op).names_of(i.shape)} or "..." in i.shape or i.shape.startswith("(")
        }
        | {"max_q", "max_ctx", "rot"}
    )


def refused(op: Op, kind: str, item: Any, ask: Any, what: str) -> str | None:
    try:
        ask()
    except (ValueError, TypeError) as error:
        message = str(error)
        named = any(re.search(rf"\b{name}\b", message) for name in tied(op, item))
        return None if named and op.name in message else f"{kind} {item.name}: {what}: says {message!r}"
    except Exception as error:  # noqa: BLE001  (whatever it is, it is the finding)
        return f"{kind} {item.name}: {what}: {type(error).__name__} {error}"
    return f"{kind} {item.name}: {what}: accepted"


def findings(op: Op, checked: Op | None = None) -> list[str]:
    """Returns the violations of the declarations of `op` that neither `op` nor `checked` refuses as it
    should."""
    checked = checked or op
    problem, call = call_of(op)
    count, guard = len(op.arguments), checked.guard(op.static(problem))
    refusals: list[str | None] = []

    def ask(place: int, item: Any, what: str, bad: Any, described: bool = True, planned: bool = True) -> None:
        changed = [*call[:place], bad, *call[place + 1 :]]
        if described and place < count:
            question = partial(fitting, op, checked.describe, changed[:count])
            refusals.append(refused(op, "describe", item, question, what))
        if planned:
            question = partial(fitting, op, lambda *values: guard(op.Call(*values)), changed)
            refusals.append(refused(op, "guard", item, question, what))

    others = {a.name for a in op.arguments if isinstance(a, Tensor | Weight)}
    for place, item in enumerate((*op.arguments, *op.returns)):
        valid = call[place]
        if isinstance(item, Tensor):
            if valid is None and item.name in GIVEN:
                continue
            assert valid is not None, f"{op.name}: no example with {item.name}"
            for what, bad, open_size in violations(op, item, valid):
                ask(place, item, what, bad, described=not open_size)
            if others != {item.name}:
                ask(place, item, "device", valid.to("meta"), planned=False)
            if not item.optional:
                ask(place, item, "None", None)
        elif isinstance(item, Weight):
            ask(place, item, "fewer rows", [valid[0][..., :-1, :].contiguous()])
            ask(place, item, "strides", [every_other(valid[0])])
            ask(place, item, "device", [valid[0].to("meta")])
            ask(place, item, "dtype", [valid[0].to(torch.uint8)])
            ask(place, item, "no tensors", [])
            ask(place, item, "two tensors", [valid[0], valid[0]], planned=False)
            ask(place, item, "dimensions", [valid[0][None]], planned=False)
        elif isinstance(item, Scalar):
            for what, bad in bad_scalars(op, item, valid):
                ask(place, item, what, bad, planned=bool(item.states))
            if item.name in Checks(op).scalar_axes:
                other = (
                    "softmax"
                    if isinstance(valid, str)
                    else type(valid)(1 - valid if valid < 2 else valid + 1)
                )
                ask(place, item, "not planned", other, described=False)
    return [line for line in refusals if line]


def test_schemas_are_those_that_callers_know() -> None:
    assert {name: (op.schema, op.outputs) for name, op in REGISTRY.ops.items()} == SCHEMAS


@pytest.mark.parametrize("op", REGISTRY.ops.values(), ids=lambda op: op.name)
def test_every_declared_property_is_checked(op: Op) -> None:
    problem, call = call_of(op)
    assert op.static(op.describe(*call[: len(op.arguments)])) == op.static(problem)
    assert op.guard(op.static(problem))(op.Call(*call)) == problem.integer(str(op.bucket))
    actual = findings(op)
    assert not actual, "\n".join(actual)


@pytest.mark.parametrize(
    ("name", "argument", "forgotten", "message"),
    [
        ("rms_norm", "weight", {"shape": "anything"}, "describe weight: n longer: accepted"),
        ("rms_norm", "x", {"strides": VECTORS}, "describe x: rows of two strides: accepted"),
        ("rms_norm", "eps", {"minimum": None}, "describe eps: below: accepted"),
        ("linear", "bias", {"shape": "anything"}, "guard bias: n longer: accepted"),
        ("moe", "inter", {"states": ""}, "guard inter: another size: accepted"),
        ("combine", "inverse", {"shape": "anything"}, "guard inverse: elements: accepted"),
        ("combine", "y", {"strides": VECTORS}, "describe y: rows apart: accepted"),
        (
            "reshape_and_cache",
            "key_cache",
            {"mutable": False},
            "guard key_cache: dimension 0 overlaps: accepted",
        ),
        ("grouped_topk", "scale", {"finite": False}, "describe scale: not finite: accepted"),
    ],
)
def test_a_forgotten_property_is_found(
    name: str, argument: str, forgotten: dict[str, Any], message: str
) -> None:
    """Planted fault: the sweep fails on an operation that checks all but one of the properties."""
    op = REGISTRY.op(name)
    arguments = tuple(replace(a, **forgotten) if a.name == argument else a for a in op.arguments)
    assert any(message in line for line in findings(op, replace(op, arguments=arguments)))


def test_the_source_is_shown() -> None:
    op = REGISTRY.op("rms_norm")
    guard = op.guard(op.static(op.problem("n=8")))
    source = inspect.getsource(guard)
    assert source.strip() in op.source and "x.dtype is d_x" in source
    x, out = torch.zeros(2, 8).bfloat16(), torch.zeros(2, 8).bfloat16()
    with pytest.raises(ValueError, match="weight must be") as caught:
        guard(op.Call(x, torch.zeros(7).bfloat16(), 1e-5, out))
    assert "raise fault(locals())" in "".join(format_exception(caught.value))


def test_strides() -> None:
    x = torch.zeros(4, 3, 8)
    assert all(question(x) for question in (rows, vectors, apart))
    assert rows(x[:, :2, :5][:, :1]) and not rows(x[:, :2]) and vectors(x[:, :2]) and apart(x[:, :2])
    assert not vectors(x[..., ::2]) and apart(x[..., ::2]) and apart(x.permute(2, 0, 1))
    assert not apart(x[:1].expand(4, 3, 8)) and not apart(torch.zeros(100).as_strided((4, 8), (7, 1)))
    assert apart(torch.zeros(0, 3)[:, :1].expand(0, 3))
    assert matrix(x[0, :, :5]) and not matrix(x[..., :5]) and matrix(x)


def test_mistakes_in_declarations_are_named() -> None:
    op = REGISTRY.op("rms_norm")
    for arguments, message in (
        ((Tensor("x", "m k"),), "no argument determines axis n"),
        ((Tensor("x", "m n*n"),), "n cannot be determined from a size n.n"),
        ((Tensor("where", "m n"),), "where: the generated checks use this name"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(op, arguments=arguments, returns=()).source  # noqa: B018


def lines_of_code(text: str) -> int:
    """Counts the lines of a Python file that are neither blank, nor comments, nor docstrings."""
    left_out = {0}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sum(
        number not in left_out and bool(line.strip()) and not line.strip().startswith("#")
        for number, line in enumerate(text.splitlines(), 1)
    )


def test_descriptions_of_operations_stay_short() -> None:
    """Shared parts are written once: all descriptions of operations have at most 100 lines of code on average."""
    assert lines_of_code('"""Doc\nstring."""\n\nx = 1  # said\n# Said.\ny = """\ntext"""\n') == 3
    files = {str(inspect.getsourcefile(op.reference)) for op in REGISTRY.ops.values()}
    assert len(files) == len(REGISTRY.ops)
    lines = sum(lines_of_code(Path(file).read_text(encoding="utf-8")) for file in files)
    assert lines <= 100 * len(files)
