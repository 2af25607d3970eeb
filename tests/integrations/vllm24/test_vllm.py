"""The worker, the attention backends and the registration inside vLLM 0.24: the tests of the newest version, which this file names."""

from __future__ import annotations

import pytest

from gristmill.integrations.vllm.attention import GristmillAttentionBackend
from gristmill.integrations.vllm.experts import GristmillExpertsMethod
from gristmill.integrations.vllm.linear import GristmillLinearMethod
from gristmill.integrations.vllm.mla import GristmillMLABackend
from gristmill.integrations.vllm.quantization import GristmillConfig
from tests.integrations.vllm.test_attention import (  # noqa: F401  # collected here
    test_a_captured_step_reads_the_lengths_of_later_ones,
    test_a_step_in_a_cuda_graph,
    test_another_plugins_backend_stays,
    test_the_backend_is_registered_under_the_name_for_plugins,
    test_the_cache_of_each_version,
    test_what_is_not_served_is_refused_by_name,
)
from tests.integrations.vllm.test_cache import *  # noqa: F403  # collected here
from tests.integrations.vllm.test_mla import (  # noqa: F401  # collected here
    test_custom_is_the_class_that_the_model_needs,
    test_decoding_over_a_latent_cache,
    test_latent_attention_refuses_by_name,
    test_writing_while_vllm_measures_memory_does_nothing,
)
from tests.integrations.vllm.test_requests import *  # noqa: F403  # collected here
from tests.integrations.vllm.test_steps import *  # noqa: F403  # collected here
from tests.integrations.vllm.test_worker import *  # noqa: F403  # collected here


@pytest.mark.parametrize(
    "name",
    [
        GristmillAttentionBackend,
        GristmillAttentionBackend.get_impl_cls(),
        GristmillAttentionBackend.get_builder_cls(),
        GristmillConfig,
        GristmillExpertsMethod,
        GristmillLinearMethod,
        GristmillMLABackend,
        GristmillMLABackend.get_impl_cls(),
        GristmillMLABackend.get_builder_cls(),
    ],
)
def test_nothing_abstract_is_left(name: type) -> None:
    assert not name.__abstractmethods__
