# SPDX-License-Identifier: Apache-2.0
"""Decide where the N-gram table's rows come from, and bring those of a step to the card before its forward pass begins.

From `--additional-config '{"flashnext": {"table": ...}}'`:
1. not given: upstream's classes, untouched (None from `embedding_class`);
2. {"path": FILE}: the prepared file;
3. {"backing": "checkpoint"}: the checkpoint's own shards, in place.
In 2 and 3 the table is a `MappedTableEmbedding`. It has no weight in memory. The weight loader's `tensor_of` brings the
shards as tensors on `meta`: upstream checks their names and shapes and counts them as loaded, and no byte is read
(safetensors 0.8 reads a tensor when it is asked for; earlier ones mapped it).

Each step: Qwen4ExpModelState.prepare_inputs calls `read_ahead`, which computes the n-gram ids with upstream's own function,
waits for them (one synchronization; they depend on the token sampled last, so there is no way around it), gathers the rows
into pinned memory and copies them into `rows_ahead`, a buffer on the card whose address never changes. The layer's forward
is a view of that buffer. So nothing inside the forward pass touches the host, and it can be captured whole.

`rows_ahead` is finite at all times: zeros at first, rows of the table afterwards, and zeros again behind the last token of
a step, where graphs read the rows of padding.
"""

import functools
from typing import Any, ClassVar

import torch
from vllm.logger import init_logger

from flashnext import table_store
from flashnext.table_gather import Counts, Gatherer

logger = init_logger("vllm.flashnext.mapped_table")

_DTYPES = {torch.bfloat16: "BF16"}


def setting_of(vllm_config: Any) -> dict[str, str] | None:
    """The checked setting, None if there is none. Raises ValueError, one line, for anything else."""
    more = vllm_config.additional_config
    setting = (more.get("flashnext") or {}).get("table") if isinstance(more, dict) else None
    if setting is None or setting == {"backing": "checkpoint"}:
        return setting
    if isinstance(setting, dict) and set(setting) == {"path"} and isinstance(setting["path"], str):
        return setting
    raise ValueError(
        f'flashnext: additional_config.flashnext.table is {setting!r}. Fix: {{"backing": "checkpoint"}} or {{"path": FILE}}'
    )


def embedding_class() -> type | None:
    """The class for the table of the model that is being built, None for upstream's choice."""
    from vllm.config import get_current_vllm_config

    return None if setting_of(get_current_vllm_config()) is None else _class()


def is_read_ahead(embedding: torch.nn.Module) -> bool:
    """Whether the rows of `embedding` are there before the forward pass, so that nothing in it need look them up."""
    return getattr(embedding, "is_read_ahead", False)


def _refuse_what_shares_rows(vllm_config: Any, etp_size: int) -> None:
    """One process, one batch a step: the buffer is indexed by the step's own tokens."""
    parallel = vllm_config.parallel_config
    for wrong, what in (
        (etp_size > 1, "an ETP group of more than one rank"),
        (parallel.use_ubatching, "micro-batches (--enable-dbo, --ubatch-size)"),
        (parallel.prefill_context_parallel_size > 1, "prefill context parallelism"),
    ):
        if wrong:
            raise ValueError(
                f"flashnext: the table on disk does not work with {what}. Fix: leave that out, or keep "
                f"the table in host memory (FLASHNEXT_TABLE=pinned; no additional_config.flashnext.table)"
            )


@functools.cache
def _class() -> type:
    # Upstream's module imports this one, so its base class is taken when the first table is built.
    from vllm.config import get_current_vllm_config
    from vllm.models.qwen4_exp.nvidia.ngram_embedding import Qwen4ExpPLEEmbedding

    class MappedTableEmbedding(Qwen4ExpPLEEmbedding):
        supports_prefetch: ClassVar[bool] = True
        is_read_ahead: ClassVar[bool] = True

        def __init__(
            self,
            num_embeddings: int,
            embedding_dim: int,
            *,
            params_dtype: torch.dtype,
            prefix: str,
            num_ngram_heads: int = 1,
            max_total_tokens: int = 0,
            **upstream: Any,
        ) -> None:
            vllm_config = get_current_vllm_config()
            setting = setting_of(vllm_config)
            super().__init__(
                num_embeddings,
                embedding_dim,
                params_dtype=params_dtype,
                prefix=prefix,
                num_ngram_heads=num_ngram_heads,
                max_total_tokens=max_total_tokens,
                **upstream,
            )
            _refuse_what_shares_rows(vllm_config, self.tp_size)
            dtype = _DTYPES.get(self.weight.dtype)
            if dtype is None:
                raise ValueError(
                    f"flashnext: the table on disk is read as {' or '.join(_DTYPES.values())}, and this model wants "
                    f"{self.weight.dtype}. Fix: --dtype bfloat16, or FLASHNEXT_TABLE=pinned (no additional_config.flashnext.table)"
                )
            self.table = _open(setting, vllm_config, prefix, self.org_vocab_size, embedding_dim, dtype)
            self.gatherer = Gatherer(self.table)
            logger.info(
                "The N-gram table %s stays on disk: %d rows of %d bytes in %d file(s), %s",
                prefix,
                self.table.rows,
                self.table.row_bytes,
                len({part.file for part in self.table.parts}),
                setting.get("path", "in the checkpoint"),
            )
            self._allocate(max_total_tokens, num_ngram_heads)

        def _allocate(self, tokens: int, heads: int) -> None:
            width = heads * self.embedding_dim
            device = torch.get_default_device()
            pinned = device.type == "cuda"
            host: dict[str, Any] = {"device": "cpu", "pin_memory": pinned}
            self.rows_ahead = torch.zeros(tokens, width, dtype=self.weight.dtype, device=device)
            self.rows_ahead_address = self.rows_ahead.data_ptr()
            self.rows_staged = torch.zeros(tokens, width, dtype=self.weight.dtype, **host)
            self.ids_staged = torch.zeros(tokens, heads, dtype=torch.int64, **host)
            # Views of the same memory, made once.
            self._ids = self.ids_staged.view(-1).numpy()
            self._bytes = self.rows_staged.view(torch.uint8).view(tokens * heads, -1).numpy()
            self._heads = heads
            self._event = torch.cuda.Event() if pinned else None

        def allocate_embedding_weight(
            self, num_embeddings: int, embedding_dim: int, dtype: torch.dtype
        ) -> torch.Tensor:
            """No rows: a parameter for the loader and the log to find."""
            return torch.empty(0, embedding_dim, dtype=dtype, device="cpu")

        def weight_loader(
            self, param: torch.Tensor, loaded_weight: torch.Tensor, checkpoint_start: int | None = None
        ) -> None:
            """Nothing to do: the caller has checked the shape, `_open` the dtype, and the values stay where they are."""
            if not loaded_weight.is_meta:
                raise ValueError(
                    "flashnext: this way of loading has read the table, all of it at each start. Fix: leave "
                    "--load-format, --safetensors-load-strategy and --model-loader-extra-config at their defaults"
                )

        def start_prefetch(self, hidden_states: torch.Tensor, ngram_ids: torch.Tensor) -> None:
            raise RuntimeError("the rows are read before the forward pass (mapped_table.read_ahead), not in it")

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            """[tokens, heads * dim]: what `bring` has put there."""
            tokens = hidden_states.shape[0]
            assert tokens <= len(self.rows_ahead), (tokens, len(self.rows_ahead))
            assert self.rows_ahead.data_ptr() == self.rows_ahead_address, "captured graphs read the old buffer"
            return self.rows_ahead[:tokens]

        def bring(self, ngram_ids: torch.Tensor, padded_tokens: int) -> Counts:
            """Put the rows of `ngram_ids` [tokens, heads] into `rows_ahead`, zeros behind them up to `padded_tokens`.

            In the order of the current stream, so the step before may still be reading. Raises OSError if the disk fails,
            after one line in the log: the engine's own report of a failed step is pages long.
            """
            tokens = ngram_ids.shape[0]
            ahead = self.rows_ahead
            assert tokens <= padded_tokens <= len(ahead), (tokens, padded_tokens, len(ahead))
            assert ahead.data_ptr() == self.rows_ahead_address, "captured graphs read the old buffer"
            self.ids_staged[:tokens].copy_(ngram_ids, non_blocking=True)
            if self._event is not None:
                # The stream's earlier work includes the last copy out of rows_staged, so that is free again too.
                self._event.record()
                self._event.synchronize()
            rows = tokens * self._heads
            try:
                counts = self.gatherer.gather(self._ids[:rows], self._bytes[:rows])
            except OSError as error:
                logger.error(
                    "flashnext: the N-gram table cannot be read, so no answer can be right any more: %s. Fix: look at the "
                    "disk (dmesg), then start again, which checks the files",
                    error,
                )
                raise
            ahead[:tokens].copy_(self.rows_staged[:tokens], non_blocking=True)
            if padded_tokens > tokens:
                ahead[tokens:padded_tokens].zero_()
            return counts

    return MappedTableEmbedding


def _open(
    setting: dict[str, str], vllm_config: Any, prefix: str, rows: int, columns: int, dtype: str
) -> table_store.Table:
    """The table of the layer that `prefix` names ("model.layers.1.ple.ple_embedding.ngram_embedding")."""
    layer = prefix[prefix.rindex("layers.") : prefix.rindex("ple.ple_embedding")]
    model = vllm_config.model_config.model
    if vllm_config.load_config.safetensors_load_strategy == "prefetch":
        raise ValueError(
            "flashnext: --safetensors-load-strategy prefetch reads every file of the checkpoint whole at each start, the "
            "table's too. Fix: leave it out"
        )
    if "path" not in setting:
        return table_store.open_checkpoint(model, layer, rows, columns, dtype)
    if vllm_config.load_config.load_format == "dummy":
        return table_store.open_flat(setting["path"], rows, columns, dtype)
    source = table_store.open_checkpoint(model, layer, rows, columns, dtype)
    try:
        return table_store.open_flat(setting["path"], rows, columns, dtype, source.identity())
    finally:
        source.close()


def tensor_of(file: Any, name: str) -> torch.Tensor:
    """Tensor `name` of an open safetensors file; a shard of a table that stays on disk comes without its values."""
    if ".ngram_embedding.shard_" in name:
        from vllm.config import get_current_vllm_config

        if setting_of(get_current_vllm_config()) is not None:
            piece = file.get_slice(name)
            return torch.empty(piece.get_shape(), dtype=torch.bfloat16, device="meta")  # `_open` has checked that it is
    return file.get_tensor(name)


def tables_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The n-gram embeddings of this stage whose rows are read ahead; [] on every other stage."""
    return [module for module in model.modules() if is_read_ahead(getattr(module, "ngram_embedding", None))]


def read_ahead(tables: list[torch.nn.Module], input_batch: Any, model_inputs: dict[str, Any]) -> None:
    """Bring the rows of this step's tokens to the card, for each of `tables`; `model_inputs` as prepare_inputs made them."""
    tokens = input_batch.num_tokens
    for table in tables:
        ids = table.compute_ngram_ids(
            input_batch.input_ids[:tokens], model_inputs["query_start_loc"], model_inputs["ngram_context"]
        )
        table.ngram_embedding.bring(ids, input_batch.num_tokens_after_padding)


def clear(tables: list[torch.nn.Module], tokens: int) -> None:
    """Zero rows for a step of dummy inputs."""
    for table in tables:
        table.ngram_embedding.rows_ahead[:tokens].zero_()
