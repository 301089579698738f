# SPDX-License-Identifier: Apache-2.0
"""The four steps of section prefill in plain PyTorch: what a device without Triton runs, and what the kernels are held to.

The same inputs, buffers and in-place merging as `flashnext.section_kernel`, so that sections, borders, flags and state are
those of the real thing; only the order of additions differs. Speed is no object: rows are taken a few at a time to
bound the gathered K and V.
"""

import math

import torch

LAST = 2**31 - 1
_ROWS = 16


def _valid(selection, table, pool, request: int, rows: range, context: int):
    """(token indices, which of them are there), both [rows, columns]."""
    part = selection[rows.start : rows.stop]
    token = part[:, :-1].long()
    columns = torch.arange(token.shape[1], device=token.device)
    valid = (columns < part[:, -1:]) & (token >= 0) & (token < context)
    block = table[request].long()[torch.where(valid, token, 0) // pool.shape[1]]
    return token, valid & (block >= 0) & (block < pool.shape[0])


class TorchSteps:
    sort_rows = 128

    def mark(self, selection, table, pool, flags, *, request: int, rows: range, context: int, granule: int) -> None:
        token, valid = _valid(selection, table, pool, request, rows, context)
        flags.zero_()
        flags[token[valid] // granule] = 1

    def mark_all(self, flags, *, context: int, granule: int) -> None:
        flags[: -(-context // granule)].fill_(1)

    def order(
        self, selection, table, pool, keys, positions, tokens, *, request: int, rows: range, context: int
    ) -> None:
        token, valid = _valid(selection, table, pool, request, rows, context)
        keys.copy_(torch.where(valid, token, LAST))
        torch.sort(keys, dim=1, out=(tokens, positions))

    def copy(self, pool, table, flags, half, *, request: int, start: int, stop: int, granule: int) -> None:
        page = pool.shape[1]
        token = torch.arange(start, stop, device=flags.device)
        token = token[flags[token // granule] != 0]
        block = table[request].long()[token // page]
        there = (block >= 0) & (block < pool.shape[0])
        token, block = token[there], block[there]
        half[token - start] = pool[block, token % page]

    def attend(self, query, half, tokens, state, gate, out, *, rows: range, start: int, stop: int) -> None:
        for first in range(rows.start, rows.stop, _ROWS):
            self._attend(
                query, half, tokens, state, gate, out, slice(first, min(first + _ROWS, rows.stop)), start, stop
            )

    def _attend(self, query, half, tokens, state, gate, out, rows: slice, start: int, stop: int) -> None:
        token = tokens[rows]
        begin, end, total = ((token < border).sum(1) for border in (start, stop, LAST))
        mine = (begin < end) | ((total == 0) & (start == 0))
        heads, dim = half.shape[1], query.shape[2]
        group = query.shape[1] // heads
        width = max(1, int((end - begin).max()))
        columns = begin[:, None] + torch.arange(width, device=token.device)
        live = columns < end[:, None]
        place = torch.where(live, token.gather(1, columns.clamp(max=token.shape[1] - 1)) - start, 0).long()
        # [rows, heads, columns, 2 * dim]; what was not copied may hold anything, NaN included
        rows_kv = torch.where(live[:, :, None, None], half[place], 0).transpose(1, 2).float()
        keys, values = rows_kv.split(dim, -1)
        count = token.shape[0]
        fresh = begin == 0
        maximum = torch.where(fresh[:, None], -1.0e20, state.maximum[rows]).view(count, heads, group)
        normalizer = torch.where(fresh[:, None], 0.0, state.normalizer[rows]).view(count, heads, group)
        accumulator = torch.where(fresh[:, None, None], 0.0, state.accumulator[rows]).view(count, heads, group, dim)
        scale = dim**-0.5 / math.log(2)
        scores = query[rows].view(count, heads, group, dim).float() @ keys.transpose(-1, -2) * scale
        there = live[:, None, None, :]
        scores = torch.where(there, scores, -1.0e20)
        higher = torch.maximum(maximum, scores.amax(-1))
        shrink = torch.exp2(maximum - higher)
        weights = torch.where(there, torch.exp2(scores - higher[..., None]), 0.0)
        accumulator = accumulator * shrink[..., None] + weights.to(half.dtype).float() @ values
        normalizer = normalizer * shrink + weights.sum(-1)
        carried = mine & (end < total)
        state.maximum[rows][carried] = higher.flatten(1)[carried]
        state.normalizer[rows][carried] = normalizer.flatten(1)[carried]
        state.accumulator[rows][carried] = accumulator.flatten(1, 2)[carried]
        done = mine & (end == total)
        result = torch.where(normalizer[..., None] > 0, accumulator / normalizer.clamp(min=1.0e-20)[..., None], 0.0)
        result = result.flatten(1, 2).to(out.dtype).float() * torch.sigmoid(gate[rows].float()).view(count, -1, dim)
        out[rows][done] = result.to(out.dtype)[done]
