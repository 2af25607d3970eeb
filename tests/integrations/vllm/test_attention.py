"""vLLM's attention layers on our kernels, over vLLM's paged cache. On a CPU vLLM has one backend, so the test stands in for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.v1.attention import selector
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from gristmill.integrations.vllm import register
from gristmill.integrations.vllm.attention import GristmillAttention, GristmillAttentionBackend
from tests.integrations.vllm.test_quantization import PARAMS, of_vllm, runtime
from tests.integrations.vllm.test_worker import generated, prompts, texts

PATH = "gristmill.integrations.vllm.attention.GristmillAttentionBackend"


@pytest.fixture
def in_place_of_vllms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", dict(registry._ATTN_OVERRIDES))
    register_backend(AttentionBackendEnum.CPU_ATTN, PATH)
    selector._cached_get_attn_backend.cache_clear()
    yield
    selector._cached_get_attn_backend.cache_clear()


def test_the_backend_is_registered_under_the_name_for_plugins() -> None:
    register()
    assert AttentionBackendEnum.CUSTOM.get_class() is GristmillAttentionBackend


def test_another_plugins_backend_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import logging

    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    register_backend(AttentionBackendEnum.CUSTOM, "other.Backend")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    register()
    assert AttentionBackendEnum.CUSTOM.get_path() == "other.Backend"
    assert "CUSTOM is other.Backend, registered by another plugin; it stays" in caplog.text


@pytest.mark.usefixtures("in_place_of_vllms")
@pytest.mark.parametrize("quant", [None, "int4_g128"])
def test_the_ids_are_those_of_the_runtime(
    host: Callable[..., Any], quant: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"quantization": None}
    if quant is not None:
        options = {"additional_config": {"gristmill": {"quant": quant}}}
    calls: list[str] = []
    for name in ("forward", "do_kv_cache_update"):
        method = getattr(GristmillAttention, name)

        def counted(self: Any, *rest: Any, _name: str = name, _method: Any = method, **named: Any) -> Any:
            calls.append(_name)
            return _method(self, *rest, **named)

        monkeypatch.setattr(GristmillAttention, name, counted)
    llm, ids = (
        of_vllm(host, "docs-llama", **options),
        texts(5),
    )  # a prompt of several chunks, and a cached prefix
    expected = runtime("docs-llama", ids, quant=quant)
    for _ in range(2):
        assert generated(llm.generate(prompts(ids), PARAMS)) == expected
    assert calls.count("forward") == calls.count("do_kv_cache_update") > 6 * 16

    views = GristmillAttention._views
    monkeypatch.setattr(GristmillAttention, "_views", lambda self, cache: views(self, cache)[::-1])
    assert generated(llm.generate(prompts(ids), PARAMS)) != expected


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"alibi_slopes": [0.5]}, "alibi_slopes"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap"),
        ({"attn_type": "encoder_only"}, "attn_type encoder_only"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    GristmillAttention(4, 64, 0.125, 2)
    with pytest.raises(ValueError, match=f"does not serve {name}: leave out"):
        GristmillAttention(4, 64, 0.125, 2, **fields)
