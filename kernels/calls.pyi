"""Written by `make generate` from the registry; do not edit."""

from torch import Tensor

from gristmill.kernel_registry.call import Call

class ActivationCall(Call):
    x: Tensor
    function: str
    out: Tensor

class AllGatherCall(Call):
    x: Tensor
    group: str
    world: int
    out: Tensor

class AllReduceCall(Call):
    x: Tensor
    group: str
    world: int

class AllReduceAddRmsNormCall(Call):
    x: Tensor
    residual: Tensor
    weight: Tensor
    eps: float
    group: str
    world: int
    out: Tensor

class AllToAllCall(Call):
    x: Tensor
    group: str
    world: int
    out: Tensor

class CombineCall(Call):
    y: Tensor
    inverse: Tensor
    weights: Tensor
    out: Tensor

class CopyBlocksCall(Call):
    source: Tensor
    cache: Tensor
    source_blocks: Tensor
    cache_blocks: Tensor
    factors: Tensor
    sums: Tensor

class FusedAddRmsNormCall(Call):
    x: Tensor
    residual: Tensor
    weight: Tensor
    eps: float
    out: Tensor

class GeluAndMulCall(Call):
    x: Tensor
    approximate: str
    out: Tensor

class GroupedLinearCall(Call):
    x: Tensor
    weight: list[Tensor]
    expert_offsets: Tensor
    permutation: Tensor | None
    top_k: int
    silu_mul: bool
    n: int
    bias: Tensor | None
    clamp: bool
    alpha: float
    limit: float
    out: Tensor

class GroupedTopkCall(Call):
    logits: Tensor
    top_k: int
    bias: Tensor | None
    n_group: int
    topk_group: int
    scoring: str
    renormalize: bool
    scale: float
    weights: Tensor
    ids: Tensor

class LayerNormCall(Call):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    eps: float
    residual: Tensor | None
    out: Tensor

class LinearCall(Call):
    x: Tensor
    weight: list[Tensor]
    bias: Tensor | None
    residual: Tensor | None
    silu_mul: bool
    n: int
    workspace: Tensor | None
    codes: Tensor | None
    scales: Tensor | None
    out: Tensor

class LinearFp32Call(Call):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    workspace: Tensor | None
    out: Tensor

class LogprobsCall(Call):
    logits: Tensor
    places: Tensor
    ids: Tensor
    k: int
    workspace: Tensor | None
    logprobs: Tensor
    tokens: Tensor

class MergeAttentionStatesCall(Call):
    a: Tensor
    a_lse: Tensor
    b: Tensor
    b_lse: Tensor
    out: Tensor
    lse: Tensor

class MlaAttentionCall(Call):
    q: Tensor
    cache: Tensor
    block_table: Tensor
    query_start: Tensor
    seq_lens: Tensor
    max_q: int
    max_ctx: int
    scale: float
    latent_dim: int
    lse: Tensor | None
    workspace: Tensor | None
    out: Tensor

class MoeCall(Call):
    x: Tensor
    weights: Tensor
    ids: Tensor
    w13: list[Tensor]
    w2: list[Tensor]
    inter: int
    workspace: Tensor | None
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    clamp: bool
    alpha: float
    limit: float
    codes: Tensor | None
    scales: Tensor | None
    activation: str
    gated: bool
    expert_offsets: Tensor | None
    permutation: Tensor | None
    inverse: Tensor | None
    out: Tensor

class PagedAttentionCall(Call):
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    query_start: Tensor
    seq_lens: Tensor
    max_q: int
    max_ctx: int
    scale: float
    window: int
    sinks: Tensor | None
    lse: Tensor | None
    workspace: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    softcap: float
    out: Tensor

class PermuteCall(Call):
    ids: Tensor
    experts: int
    expert_offsets: Tensor
    permutation: Tensor
    inverse: Tensor

class ProcessLogitsCall(Call):
    logits: Tensor
    places: Tensor
    fed: Tensor
    slots: Tensor
    penalties: Tensor
    seen: Tensor
    bias: Tensor
    counted: Tensor
    barred: Tensor
    mask: Tensor
    mask_rows: Tensor
    out: Tensor
    largest: Tensor

class QkNormRopeCacheCall(Call):
    qkv: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    positions: Tensor
    cos_sin: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slot_mapping: Tensor
    interleaved: bool
    k_scale: Tensor | None
    v_scale: Tensor | None
    q: Tensor

class ReshapeAndCacheCall(Call):
    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slot_mapping: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None

class ReshapeAndCacheMlaCall(Call):
    latent: Tensor
    cache: Tensor
    slot_mapping: Tensor

class RmsNormCall(Call):
    x: Tensor
    weight: Tensor
    eps: float
    out: Tensor

class RmsNormQuantCall(Call):
    x: Tensor
    residual: Tensor | None
    weight: Tensor
    eps: float
    codes: Tensor
    scales: Tensor
    format: str
    normed: Tensor | None

class RotaryEmbeddingCall(Call):
    q: Tensor
    k: Tensor | None
    positions: Tensor
    cos_sin: Tensor
    interleaved: bool

class RouteCall(Call):
    logits: Tensor
    top_k: int
    local: int
    first: int
    bias: Tensor | None
    n_group: int
    topk_group: int
    scoring: str
    renormalize: bool
    scale: float
    weights: Tensor
    ids: Tensor
    expert_offsets: Tensor
    permutation: Tensor
    inverse: Tensor

class SampleCall(Call):
    logits: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    index: Tensor
    workspace: Tensor | None
    ids: Tensor

class SiluAndMulCall(Call):
    x: Tensor
    out: Tensor

class SiluAndMulQuantCall(Call):
    x: Tensor
    codes: Tensor
    scales: Tensor
    format: str

class VarlenAttentionCall(Call):
    q: Tensor
    k: Tensor
    v: Tensor
    query_start: Tensor
    context_start: Tensor
    max_q: int
    max_ctx: int
    scale: float
    lse: Tensor | None
    window_left: int
    window_right: int
    out: Tensor
