"""Test only: all pipeline stages on the one card that there is, each in its own process as ever.

NCCL refuses two ranks of one host on one card. With a host name of its own (NCCL_HOSTID) each rank takes the other for another
machine and talks to it over a socket. The steps, streams and hand-overs are those of two cards; the two processes take turns on
the card, so times mean nothing.
"""

from __future__ import annotations

import os


def register() -> None:
    from vllm.v1.worker import gpu_worker

    worker = gpu_worker.Worker
    if hasattr(worker, "is_on_one_card"):  # plugins are asked for more than once
        return
    worker.is_on_one_card = True
    init_device = worker.init_device

    def on_the_first_card(self):
        os.environ |= {"NCCL_HOSTID": f"stage-{self.rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        self.local_rank = 0
        init_device(self)

    worker.init_device = on_the_first_card
