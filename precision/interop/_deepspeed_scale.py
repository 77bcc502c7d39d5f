"""DeepSpeed's loss scale: the fields of ``fp16``, and what becomes of a policy's loss scale where it has none.

Its rule is ours with fixed factors, except that it grows one step late (``stable_interval`` in its ``DynamicLossScaler``).
"""

from __future__ import annotations

import math

from precision.errors import InteropError
from precision.interop.base import Field, Losses, Section, shown
from precision.loss_scale import LossScale

SCALE_FIELDS = (
    Field("fp16.loss_scale", "loss_scale.mode", "0 for dynamic; otherwise the static scale"),
    Field("fp16.initial_scale_power", "loss_scale.initial", "its base-2 logarithm, a whole number"),
    Field("fp16.loss_scale_window", "loss_scale.growth_interval", "the same number; DeepSpeed grows one step late"),
    Field("fp16.hysteresis", "loss_scale.hysteresis", "the same number; ignored at ZeRO stage 0"),
    Field("fp16.consecutive_hysteresis", "loss_scale.hysteresis_refill", "true for on_finite_step"),
    Field("fp16.min_loss_scale", "loss_scale.minimum", "a whole number of at least 1"),
)
_DEFAULT = LossScale(mode="dynamic")


def fp16_scale(scale: LossScale, stage: int, losses: Losses) -> dict[str, float | int | bool]:
    """The fields of ``fp16`` for a loss scale; notes and losses besides."""
    off = {"initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 1, "consecutive_hysteresis": False,
           "min_loss_scale": 1}  # fmt: skip
    if scale.mode == "none":
        losses.unless(False, "loss_scale", "DeepSpeed scales by 1, and skips steps with non-finite gradients")
        return {"loss_scale": 1.0, **off}
    _skips(scale, losses)
    if scale.mode == "static":
        return {"loss_scale": scale.initial, **off}
    for field, fixed in (("growth_factor", 2.0), ("backoff_factor", 0.5)):
        losses.unless(getattr(scale, field) == fixed, f"loss_scale.{field}", f"DeepSpeed's is fixed at {fixed:g}")
    minimum = max(1, math.ceil(scale.minimum))
    losses.unless(
        scale.minimum == minimum,
        "loss_scale.minimum",
        f"DeepSpeed's is a whole number of at least 1; it will be {minimum}",
    )
    power = max(0, round(math.log2(scale.initial)))
    power += 2.0**power < minimum
    losses.unless(
        scale.initial == 2.0**power, "loss_scale.initial", f"DeepSpeed's is a power of two; it will be {2.0**power:g}"
    )
    losses.unless(
        scale.maximum == _DEFAULT.maximum, "loss_scale.maximum", "DeepSpeed has none: the scale grows without bound"
    )
    losses.unless(
        stage > 0 or scale.hysteresis == 1, "loss_scale.hysteresis",
        "DeepSpeed ignores it at ZeRO stage 0 and backs off at once; use a later stage",
    )  # fmt: skip
    losses.note(
        f"DeepSpeed grows the scale one step late: after {scale.growth_interval + 1} finite steps where the policy says "
        f"{scale.growth_interval}, then every {scale.growth_interval}"
    )
    losses.note(
        "on a step after which the scale grows, DeepSpeed unscales with the grown scale: that step's gradients are halved"
    )
    losses.note("DeepSpeed has no maximum: the scale grows without bound")
    if stage > 0:
        losses.note(
            "under ZeRO a non-finite step at the minimum ends the run with an exception, where the policy skips on"
        )
    return {
        "loss_scale": 0,
        "initial_scale_power": power,
        "loss_scale_window": scale.growth_interval,
        "hysteresis": scale.hysteresis if stage > 0 else 1,
        "consecutive_hysteresis": scale.hysteresis_refill == "on_finite_step",
        "min_loss_scale": minimum,
    }


def bf16_check(scale: LossScale, always: bool, losses: Losses) -> bool:
    """``bf16.check_grad_overflow``. ``always``: the engine skips non-finite steps whatever it says."""
    if scale.mode == "none":
        losses.note(
            "steps with non-finite gradients are skipped here whatever check_grad_overflow says" if always else
            "check_grad_overflow is false, as loss_scale.mode is none: steps with non-finite gradients are taken; a static "
            "loss scale of 1 turns it on"
        )  # fmt: skip
        return False
    if scale.mode == "dynamic" or scale.initial != 1.0:
        losses.unless(
            False, "loss_scale", "with bf16 DeepSpeed scales no loss; steps with non-finite gradients are skipped"
        )
    else:
        _skips(scale, losses)
    return True


def autocast_scale(scale: LossScale, compute: str, stage: int, losses: Losses) -> None:
    """What becomes of a loss scale with float32 parameters: it has no fields there."""
    if compute != "float16":
        skipping = "; steps with non-finite gradients are skipped under ZeRO in any case" if stage > 0 else ""
        losses.unless(
            scale.mode == "none", "loss_scale", f"DeepSpeed scales no loss if ops compute in {compute}{skipping}"
        )
        if stage > 0:
            losses.note("under ZeRO, steps with non-finite gradients are skipped")
        return
    if stage > 0:
        losses.unless(
            False, "loss_scale",
            "with torch_autocast in float16 under ZeRO the scale stays at 65536: it never backs off, every overflowing step is "
            "skipped, and gradient_clipping clips the scaled gradients; use low_params, ZeRO stage 0 or bfloat16",
        )  # fmt: skip
        return
    losses.note(
        "torch_autocast in float16 scales the loss by PyTorch's own GradScaler with its defaults, which has no bounds"
    )
    losses.note(
        "DeepSpeed counts a step that the GradScaler skipped as taken: its skipped_steps stays 0, schedules move on"
    )
    if scale.mode != "dynamic":
        losses.unless(False, "loss_scale", "PyTorch's GradScaler scales dynamically, from 65536")
        return
    for field in LossScale.model_fields:
        if field != "mode":
            ours, theirs = getattr(scale, field), getattr(_DEFAULT, field)
            does = "it has none" if field in ("minimum", "maximum", "max_consecutive_skips") else f"it is {theirs}"
            losses.unless(ours == theirs, f"loss_scale.{field}", f"fixed by PyTorch's GradScaler: {does}")


def _skips(scale: LossScale, losses: Losses) -> None:
    losses.unless(
        scale.max_consecutive_skips is None, "loss_scale.max_consecutive_skips",
        "DeepSpeed does not count them: it goes on skipping",
    )  # fmt: skip


def read_fp16_scale(fp16: Section, stage: int, notes: list[str]) -> LossScale:
    """The loss scale that the fields of ``fp16`` amount to, with DeepSpeed's defaults for what is not said."""
    static = fp16.number("loss_scale", 0.0)
    power = fp16.whole("initial_scale_power", 16)
    window = fp16.whole("loss_scale_window", 1000, least=0)
    hysteresis = fp16.whole("hysteresis", 2, least=0)
    consecutive = fp16.flag("consecutive_hysteresis", False)
    minimum = fp16.number("min_loss_scale", 1.0)
    if static is None or power is None or window is None or hysteresis is None or minimum is None or static < 0:
        raise InteropError(f"{fp16.name('loss_scale')} must be at least 0 (0 is dynamic), not {shown(static)}.")
    if static > 0:
        return LossScale(mode="static", initial=static)
    for key, value in (("loss_scale_window", window), ("min_loss_scale", minimum), ("hysteresis", hysteresis)):
        if value < 1 or value != int(value):
            raise InteropError(f"{fp16.name(key)} must be a whole number of at least 1, not {shown(value)}.")
    if power > 127:
        raise InteropError(f"{fp16.name('initial_scale_power')} must be at most 127, not {power}.")
    if stage == 0 and hysteresis != 1:
        notes.append(f"hysteresis {hysteresis} is ignored at ZeRO stage 0: the scale backs off at once")
    notes.append("DeepSpeed grows the scale one step late")
    return LossScale(
        mode="dynamic",
        initial=2.0**power,
        growth_interval=window,
        minimum=minimum,
        maximum=max(_DEFAULT.maximum, 2.0**power),
        hysteresis=hysteresis if stage > 0 else 1,
        hysteresis_refill="on_finite_step" if consecutive else "on_growth",
    )
