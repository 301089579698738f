# SPDX-License-Identifier: Apache-2.0
"""Decide whether K and V of the QSA layers live in page-locked host memory, and run QSA's write and attention over it.

From `--additional-config '{"flashnext": {"host_kv": {"max_bytes": N, "arena_bytes": N}}}'`:
1. not given: upstream's classes and upstream's cache, untouched;
2. given with what it cannot work with: refused when the config is made (`check`), with one reason;
3. given: a QSA layer keeps a placeholder of 2 bytes per token on the card, which carries the block tables, and its K/V row of a
   block id lies in host memory under the same id.

`max_bytes` caps what all stages reserve on the host. `arena_bytes` is the size of the buffer on the card through which prefill
reads the context (section_prefill). With `"hot_rows": true` decoding rows keep on the card what the step before selected (hot_rows).

What keeps upstream's code right:
- `layer.kv_cache` stays the placeholder on the card. The zeroing of new blocks goes by it; over the host rows it would write a
  whole block per layer through PCIe for each block id. Host rows are zero at first, and old rows are never selected.
- Upstream's JIT warm-up takes shapes from the cache; it asks `warm_up` (patch 0013).
- Caches are also bound to measure CUDA graphs before the number of blocks is known (cache_config.num_gpu_blocks is None then).
  All layers share one small buffer for that; the pool is allocated once, with the real number of blocks.
- Addresses never change once bound, so captured graphs stay valid; this is asserted at each step that is not a replay.

A step: upstream's write kernel and upstream's attention kernel, over a view of the host rows that the card reads itself (UVA).
Rows of requests in prefill, which come last in a batch, go to section_prefill instead, which reads each block once per chunk.

Ran on one and two H200 (docs/gpu.md), never on an RTX 3090.
"""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from flashnext import block_size, host_pool
from flashnext.section_prefill import SectionPrefill, Span

if TYPE_CHECKING:
    from flashnext.hot_rows import HotRows

logger = init_logger("vllm.flashnext.host_kv")

cuda = host_pool.Cuda()
"""The CUDA calls; tests put a recorder here."""


@dataclass(frozen=True)
class Setting:
    max_bytes: int
    arena_bytes: int
    hot_rows: bool = False


def setting_of(vllm_config: Any) -> Setting | None:
    """The checked setting, None if there is none. Raises ValueError, one line, for anything else."""
    more = vllm_config.additional_config
    setting = (more.get("flashnext") or {}).get("host_kv") if isinstance(more, dict) else None
    if setting is None:
        return None
    names = Setting.__dataclass_fields__
    fix = 'Fix: {"max_bytes": BYTES, "arena_bytes": BYTES}'
    if not isinstance(setting, dict):
        raise ValueError(f"flashnext: additional_config.flashnext.host_kv is {setting!r}. {fix}")
    for name in [*setting, *names]:
        if name not in names:
            raise ValueError(f"flashnext: additional_config.flashnext.host_kv has {name!r}, which is not known. {fix}")
        value = setting.get(name)
        if name == "hot_rows":
            if type(setting.get(name, False)) is not bool:
                raise ValueError(
                    f"flashnext: additional_config.flashnext.host_kv.hot_rows is {value!r}. Fix: true or false"
                )
        elif type(value) is not int or value <= 0:
            raise ValueError(
                f"flashnext: additional_config.flashnext.host_kv.{name} is {value!r}, no number of bytes. {fix}"
            )
    return Setting(**setting)


def check(vllm_config: Any) -> None:
    """Refuse what host K/V does not work with, and a wrong setting: NotImplementedError, one line. Called when the config is made."""
    try:
        if setting_of(vllm_config) is not None:
            _check(vllm_config)
    except ValueError as error:
        raise NotImplementedError(str(error)) from None  # pydantic would add its own words to a ValueError


def _check(vllm_config: Any) -> None:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    for wrong, what, fix in (
        (parallel.tensor_parallel_size > 1, "tensor parallelism", "--tensor-parallel-size 1"),
        (vllm_config.speculative_config is not None, "speculative decoding", "no --speculative-config"),
        (cache.enable_prefix_caching, "prefix caching", "--no-enable-prefix-caching"),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "context parallelism",
            "--decode-context-parallel-size 1 --prefill-context-parallel-size 1",
        ),
        (cache.cache_dtype not in ("auto", "bfloat16"), f"{cache.cache_dtype} K/V", "--kv-cache-dtype auto"),
        (
            vllm_config.kv_transfer_config is not None or cache.kv_offloading_size is not None,
            "KV connectors",
            "no --kv-transfer-config and no --kv-offloading-size",
        ),
    ):
        if wrong:
            raise ValueError(
                f"flashnext: K/V in host memory does not work with {what}. Fix: {fix}, or leave "
                f"additional_config.flashnext.host_kv out"
            )
    layers = block_size.qsa_layers(vllm_config)
    if 0 in layers:
        raise ValueError(
            f"flashnext: K/V in host memory needs a full-attention layer on each stage, and stage {layers.index(0) + 1} of "
            f"{len(layers)} has none. Fix: another VLLM_PP_LAYER_PARTITION"
        )
    if cache.user_specified_block_size and cache.block_size != (right := block_size.computed(vllm_config)):
        raise ValueError(
            f"flashnext: K/V in host memory needs blocks of {right} tokens here, and the block size given is "
            f"{cache.block_size}. Fix: no --block-size"
        )


# -- backends


def backend(vllm_config: Any, stock: type) -> type:
    """The attention backend of a QSA layer."""
    return stock if setting_of(vllm_config) is None else _backend(stock)


def state_backend(vllm_config: Any, stock: type) -> type:
    """The backend of QSA's index caches."""
    return block_size.state_backend(vllm_config, stock, setting_of(vllm_config) is not None)


@functools.cache
def _backend(stock: type) -> type:
    from dataclasses import replace

    from vllm.v1.kv_cache_interface import FullAttentionSpec

    class HostRowsMetadataBuilder(stock.get_builder_cls()):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            metadata.host_batch = Batch.of(common_attn_metadata)
            layer = self.vllm_config.compilation_config.static_forward_context[self.layer_names[0]]
            layer.host_kv.begin_step(common_attn_metadata, metadata.host_batch)
            return metadata

    class HostRowsBackend(stock):
        @classmethod
        def customize_spec(cls, spec):
            spec = super().customize_spec(spec)
            if type(spec) is not FullAttentionSpec:
                return spec
            return replace(spec, num_head_slots=1, state_content_bytes=block_size.SLOT_BYTES)

        @staticmethod
        def get_builder_cls():
            return HostRowsMetadataBuilder

    return HostRowsBackend


@dataclass(frozen=True)
class Batch:
    """What the host knows of a step without asking the card. `starts`: first row of each request, and the end.

    `lengths`: tokens of each request, this step's included, or more: with asynchronous scheduling the host knows a bound. `is_close`:
    the bound is each request's own, which exceeds its length only where draft tokens were rejected, not that of the batch.
    """

    starts: list[int]
    lengths: list[int]
    is_close: bool

    @classmethod
    def of(cls, common: Any) -> "Batch":
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        bound = common.seq_lens_cpu_upper_bound
        lengths = [common.max_seq_len] * common.num_reqs if bound is None else bound[: common.num_reqs].tolist()
        return cls(starts, lengths, bound is not None)

    def spans(self, first_request: int, first_row: int, rows: int) -> list[Span]:
        """The span of each request from `first_request` on that has rows; rows count from `first_row`.

        Raises RuntimeError unless they cover exactly the `rows` rows after `first_row`.
        """
        found, at = [], 0
        for request in range(first_request, len(self.lengths)):
            start, stop = (self.starts[request + end] - first_row for end in (0, 1))
            if start != at or stop < start:
                raise RuntimeError(f"request {request} has rows {start} to {stop} where row {at} is next")
            if stop > start:
                found.append(Span(request, start, stop, max(self.lengths[request], stop - start)))
            at = stop
        if at != rows:
            raise RuntimeError(f"requests have {at} of {rows} prefill rows")
        return found


# -- the rank


class HostKV:
    """Host rows of all QSA layers of this process. One object, made with the first layer and shared by the others."""

    def __init__(self, setting: Setting, vllm_config: Any, layer: Any) -> None:
        self.setting, self.vllm_config = setting, vllm_config
        self.names: list[str] = []  # layers, in order
        self.kv_heads, self.head_dim, self.query_heads = layer.num_kv_heads, layer.head_dim, layer.num_heads
        self.selection_width = layer.indexer.output_width
        self.ratio = layer.indexer.compress_ratio
        self.hot: HotRows | None = None
        self.engine_layers = sum(block_size.qsa_layers(vllm_config))
        self.block_tokens = block_size.computed(vllm_config)
        self.pool: host_pool.HostPool | None = None
        self.blocks = 0
        self.is_measuring = False  # graphs, over one small buffer
        self._rows: dict[str, torch.Tensor] = {}
        self._addresses: dict[str, int] = {}
        self._say_block()
        # Made with the model, so that the memory counts as the model's: nothing that is measured later reaches it.
        self.sections = self._sections(torch.get_default_device())

    @property
    def row_bytes(self) -> int:
        """K and V of one token in one layer (2,048 for the published model)."""
        return self.kv_heads * 2 * self.head_dim * 2

    def _say_block(self) -> None:
        layers = block_size.qsa_layers(self.vllm_config)
        card, state = block_size.card_bytes(self.vllm_config), block_size.state_page_bytes(self.vllm_config)
        page = max(layers) * card * self.block_tokens
        logger.info(
            "K/V of the QSA layers go to host memory: blocks of %d tokens, for %d of them at %d bytes a token on the fullest of "
            "%d stage(s) fill a state page of %d bytes; a page is %d (%.2f %% over), and %d bytes of host memory in each of %d layers",
            self.block_tokens,
            max(layers),
            card,
            len(layers),
            state,
            page,
            100 * (page - state) / state,
            self.block_tokens * self.row_bytes,
            self.engine_layers,
        )

    def _sections(self, device: torch.device) -> SectionPrefill:
        try:
            return SectionPrefill(
                arena_bytes=self.setting.arena_bytes,
                block_size=self.block_tokens,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                query_heads=self.query_heads,
                max_rows=self.vllm_config.scheduler_config.max_num_batched_tokens,
                selection_width=self.selection_width,
                device=device,
            )
        except ValueError as error:
            raise ValueError(
                f"flashnext: {error}. Fix: another additional_config.flashnext.host_kv.arena_bytes"
            ) from None

    def _hot_rows(self, device: torch.device) -> "HotRows":
        from flashnext.hot_rows import HotRows  # Triton, which is not everywhere

        if not self.vllm_config.use_v2_model_runner:
            raise ValueError(
                "flashnext: rows that stay on the card need the requests' numbers, which vLLM's model runner V1 does not give. Fix: no "
                "VLLM_USE_V2_MODEL_RUNNER=0, or no additional_config.flashnext.host_kv.hot_rows"
            )
        return HotRows(
            layers=len(self.names),
            requests=self.vllm_config.scheduler_config.max_num_seqs,
            context=self.vllm_config.model_config.max_model_len,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            groups=self.selection_width // self.ratio,
            ratio=self.ratio,
            device=device,
        )

    # -- memory

    def bind(self, name: str, placeholder: torch.Tensor) -> None:
        """Host rows for layer `name`, whose cache on the card is `placeholder` [blocks, 1, block size, 1]."""
        blocks, heads, tokens, width = placeholder.shape
        if (heads, width) != (1, 1) or tokens != self.block_tokens:
            raise ValueError(
                f"flashnext: the cache of {name} is {list(placeholder.shape)}, and with K/V in host memory it has 1 head of "
                f"{self.block_tokens} tokens. Fix: no --block-size"
            )
        known = self.vllm_config.cache_config.num_gpu_blocks
        measuring = known is None
        if not measuring and known != blocks:
            raise RuntimeError(f"{name} has {blocks} blocks of the engine's {known}")
        if self.pool is None or self.is_measuring != measuring or (measuring and self.blocks != blocks):
            if self.pool is not None and not self.is_measuring:
                raise RuntimeError("the engine measures CUDA graphs after its K/V pool was bound")
            if self.setting.hot_rows and self.hot is None:
                self.hot = self._hot_rows(placeholder.device)
            self._allocate(blocks, measuring)
        if blocks != self.blocks:
            raise RuntimeError(f"captured graphs read the pool of {self.blocks} blocks, and {name} has {blocks}")

    def _allocate(self, blocks: int, measuring: bool) -> None:
        self.release()
        nbytes = blocks * self.block_tokens * self.row_bytes
        count = 1 if measuring else len(self.names)
        pool = host_pool.allocate(
            count,
            nbytes,
            engine_count=1 if measuring else self.engine_layers,
            cap_bytes=self.setting.max_bytes,
            cuda=cuda,
            what=f"K/V of {self.engine_layers} QSA layers in {blocks} blocks of {self.block_tokens} tokens",
        )
        try:
            shape = (blocks, self.block_tokens, self.kv_heads, 2 * self.head_dim)
            views = [cuda.view(buffer.tensor().view(torch.bfloat16).view(shape)) for buffer in pool.buffers]
        except BaseException as error:
            pool.release()
            if isinstance(error, host_pool.NotLocked):
                raise host_pool.Refused(
                    f"flashnext: the card cannot read the K/V pool ({error}). Fix: {host_pool.lock_hints(nbytes, host_pool.room())}"
                ) from None
            raise
        self.pool, self.blocks, self.is_measuring = pool, blocks, measuring
        self._rows = dict(zip(self.names, views * len(self.names) if measuring else views, strict=not measuring))
        self._addresses = {name: rows.data_ptr() for name, rows in self._rows.items()}
        if not measuring:
            logger.info(
                "K/V pool of %d QSA layer(s) of this stage: %d blocks of %d tokens, %d bytes a layer, %s here and %s in all "
                "stages of %s allowed, %s in %.1f s; %s",
                count,
                blocks,
                self.block_tokens,
                nbytes,
                host_pool.gib(pool.reserved_bytes),
                host_pool.gib(pool.reserved_bytes // count * self.engine_layers),
                host_pool.gib(self.setting.max_bytes),
                pool.way,
                pool.seconds,
                pool.landed(),
            )

    def release(self) -> None:
        """Give the memory back. The device must be done with it."""
        pool, self.pool, self.blocks = self.pool, None, 0
        self._rows, self._addresses = {}, {}
        if pool is not None:
            pool.release()

    # -- a step

    def begin_step(self, common: Any, batch: "Batch") -> None:
        """Before the first attention of a step."""
        if self.hot is not None:
            if common.req_idx is None:
                raise RuntimeError("the runner does not say whose the rows of the step are: patch 0016 is missing")
            self.hot.begin_step(common.req_idx.tolist(), batch.starts, batch.lengths if batch.is_close else None)

    def decode(
        self,
        name: str,
        query: torch.Tensor,
        table: torch.Tensor,
        selection: torch.Tensor,
        owner: torch.Tensor,
        out: torch.Tensor,
        gate: torch.Tensor,
    ) -> None:
        """Attention of decoding rows, over the host rows or what is kept of them on the card."""
        from vllm.models.qwen4_exp.nvidia.ops import qsa as ops

        pool = self.rows(name)
        if self.hot is not None and len(query) <= self.hot.requests:
            self.hot.attend(self.names.index(name), query, pool, table, selection, owner, gate, out)
            return
        keys, values = pool.split(self.head_dim, dim=-1)
        ops.qsa_sparse_paged_attention(query, keys, values, selection, table, owner, False, out, output_gate=gate)

    def rows(self, name: str) -> torch.Tensor:
        """bf16 [blocks, block size, kv heads, K | V] of layer `name`, as the card sees it."""
        rows = self._rows[name]
        assert rows.data_ptr() == self._addresses[name], "captured graphs read the old rows"
        return rows


def of_layer(layer: Any, vllm_config: Any) -> HostKV | None:
    """What the QSA layer that is being built, with its heads and its indexer, has its host rows from; None: on the card."""
    setting = setting_of(vllm_config)
    if setting is None:
        return None
    layers = vllm_config.compilation_config.static_forward_context.values()
    shared = next((found for other in layers if (found := getattr(other, "host_kv", None)) is not None), None)
    host = shared or HostKV(setting, vllm_config, layer)
    host.names.append(layer.layer_name)
    return host


def bind(layer: Any) -> None:
    """After upstream bound `layer.kv_cache`."""
    if layer.host_kv is not None:
        layer.host_kv.bind(layer.layer_name, layer.kv_cache)


def rows(layer: Any) -> torch.Tensor:
    """bf16 [blocks, kv heads, block size, K | V], upstream's order of dimensions: the host rows, or upstream's own cache."""
    return layer.kv_cache if layer.host_kv is None else layer.host_kv.rows(layer.layer_name).transpose(1, 2)


def warm_up(layer: Any, block_table: torch.Tensor) -> torch.Tensor:
    """What upstream's warm-up takes its shapes from; the kernels for rows in prefill are compiled beside it."""
    if layer.host_kv is not None:
        layer.host_kv.sections.warm_up(layer.host_kv.rows(layer.layer_name), block_table)
    return rows(layer)


def fetch_ahead(host: HostKV, name: str, side: Any) -> None:
    """Begin to bring K/V of the QSA layer after `name` to the card, where this step has rows in prefill.

    That layer may be in another group of layers than this one, with a block table of its own.
    """
    from vllm.forward_context import get_forward_context

    at = host.names.index(name) + 1
    if at == len(host.names):
        return
    following = host.names[at]
    metadata = get_forward_context().attn_metadata[following]
    if metadata.host_batch.is_close:
        decodes = side.num_decode_tokens
        spans = metadata.host_batch.spans(side.num_decodes, decodes, metadata.num_actual_tokens - decodes)
        host.sections.fetch_ahead(host.rows(following), metadata.block_table, spans, metadata.host_batch)


def attend(layer: Any, query: torch.Tensor, metadata: Any, side: Any, output: torch.Tensor, gate: torch.Tensor) -> bool:
    """Attention of a batch into `output` [rows, heads, dim], where it has rows in prefill or decoding rows are kept on the card; False:
    neither, upstream's way will do.

    `metadata` is the main cache's, `side` that of an index cache, which knows how many rows decode. The layer's selection is
    there and this step's K/V are written.
    """
    host: HostKV | None = layer.host_kv
    if host is None or (side.num_prefills == 0 and host.hot is None):
        return False
    decodes, tokens = side.num_decode_tokens, metadata.num_actual_tokens
    pool, selection, table = host.rows(layer.layer_name), layer.topk_indices_buffer, metadata.block_table
    output.zero_()
    if decodes:
        host.decode(
            layer.layer_name,
            query[:decodes],
            table,
            selection[:decodes],
            side.token_to_req[:decodes],
            output[:decodes],
            gate[:decodes],
        )
    if side.num_prefills == 0:
        return True
    spans = metadata.host_batch.spans(side.num_decodes, decodes, tokens - decodes)
    prefill = slice(decodes, tokens)
    host.sections(
        query[prefill],
        pool,
        table,
        selection[prefill],
        spans,
        gate[prefill],
        output[prefill],
        step=metadata.host_batch,
    )
    fetch_ahead(host, layer.layer_name, side)
    return True


def release(vllm_config: Any) -> None:
    """At shutdown: the device is idle, graphs are gone, and the layers are about to be forgotten."""
    for layer in vllm_config.compilation_config.static_forward_context.values():
        if (host := getattr(layer, "host_kv", None)) is not None:
            host.release()
