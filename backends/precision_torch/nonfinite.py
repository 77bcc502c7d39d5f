"""Which gradients are not finite: for the error that ends a run that diverges, and for whoever wants to look."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from precision.divergence import NonFiniteTensor
from precision_torch.agreement import Groups
from precision_torch.attachments import attachments
from precision_torch.engines import canonical, local, reduced

FIRST = 8
"""How many are named."""


def named_gradients(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[str, torch.Tensor | None]]:
    """The gradients of optimizers (None where there is none), by the names of their parameters, as far as those are known.

    Names are those of the model that was prepared with the optimizer, those that the optimizer was made with
    (``named_parameters()``), or the place in ``param_groups``.
    """
    for optimizer in optimizers:
        attached = attachments(optimizer)
        names: dict[int, str] = {id(param): name for param, name in attached.names.items()}
        if attached.masters is not None:
            names.update(zip(map(id, attached.masters.high), attached.masters.names, strict=True))
        for g, group in enumerate(optimizer.param_groups):
            own = group.get("param_names") or []
            for i, param in enumerate(group["params"]):
                place = own[i] if i < len(own) else f"param_groups[{g}]['params'][{i}]"
                yield canonical(names.get(id(param), place)), param.grad


@torch.no_grad()
def nonfinite_tensors(
    named: Iterable[tuple[str, torch.Tensor | None]], groups: Groups = (), first: int = FIRST
) -> list[NonFiniteTensor]:
    """The first tensors that hold NaN or infinity, with how many. Reads the device, and gathers from the ranks of groups.

    Args:
        named: names and tensors (or None), in the order to report; the same names on every rank.
        groups: whose ranks all call this. A tensor that is the same on all of them is reported once, without a rank.
        first: how many to report.
    """
    found: list[tuple[int, NonFiniteTensor]] = []
    rank = dist.get_rank() if groups else None
    for order, (name, tensor) in enumerate(named):
        if tensor is None:
            continue
        if tensor.layout is torch.sparse_coo:
            tensor = tensor.coalesce().values()
        part = local(reduced(tensor))
        # reduced() is a collective: no rank stops early
        if len(found) >= first or (not part.is_floating_point() and not part.is_complex()):
            continue
        nan, inf = int(part.isnan().sum()), int(part.isinf().sum())
        if nan or inf:
            found.append((order, NonFiniteTensor(name, nan, inf, part.numel(), rank)))
    for group in groups:
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, found, group=group)
        found = sorted({item for part in gathered for item in part}, key=lambda item: (item[0], item[1].rank or 0))
    return _merged(found, groups)[:first]


def _merged(found: list[tuple[int, NonFiniteTensor]], groups: Groups) -> list[NonFiniteTensor]:
    """One entry for a tensor of which every rank said the same."""
    ranks = 1
    for group in groups:
        ranks *= group.size()
    merged: list[NonFiniteTensor] = []
    orders = sorted({order for order, _ in found})
    for order in orders:
        same = [tensor for each, tensor in found if each == order]
        alike = {(t.name, t.nan, t.inf, t.size) for t in same}
        if groups and len(same) == ranks and len(alike) == 1:
            first = same[0]
            merged.append(NonFiniteTensor(first.name, first.nan, first.inf, first.size))
        else:
            merged += same
    return merged
