"""A vLLM CPU worker that brings table rows before each step, as Qwen4ExpModelState.prepare_inputs does on a card.

    LLM(..., worker_cls="table_worker.TableWorker", load_format="dummy",
        additional_config={"flashnext": {"table": {"path": FILE}}, "test_table": [ROWS, COLUMNS, HEADS]})

The model is whatever the engine was given; its own forward pass takes no notice of the rows. The ids are the step's
number of tokens times HEADS rows, drawn from the first half of the table, or from all of it once FILE.all exists.
"""

import os

import torch
from flashnext import mapped_table
from vllm.config import set_current_vllm_config
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.worker.cpu_worker import CPUWorker

PREFIX = "model.layers.1.ple.ple_embedding.ngram_embedding"


class TableWorker(CPUWorker):
    def load_model(self, *args, **kwargs):
        super().load_model(*args, **kwargs)
        from vllm.models.qwen4_exp.nvidia.ngram_embedding import Qwen4ExpPLEUnquantizedEmbeddingMethod

        self.rows, columns, self.heads = self.vllm_config.additional_config["test_table"]
        with set_current_vllm_config(self.vllm_config), set_default_torch_dtype(torch.bfloat16):
            self.embedding = mapped_table._class()(
                self.rows,
                columns,
                params_dtype=torch.bfloat16,
                padding_size=1,
                prefix=PREFIX,
                embedding_method=Qwen4ExpPLEUnquantizedEmbeddingMethod(),
                num_ngram_heads=self.heads,
                max_total_tokens=self.vllm_config.scheduler_config.max_num_batched_tokens,
            )

    def execute_model(self, scheduler_output):
        tokens = scheduler_output.total_num_scheduled_tokens
        if tokens:
            whole = os.path.exists(self.embedding.table.parts[0].file + ".all")
            below = self.rows if whole else self.rows // 2
            self.embedding.bring(torch.randint(0, below, (tokens, self.heads)), tokens)
        return super().execute_model(scheduler_output)
