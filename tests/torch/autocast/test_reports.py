"""Public reports of autocasting gone wrong, each as a small model of our own with the right value beside it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..helpers import bind

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def test_cpu_softmax_is_not_cast_as_on_cuda():
    # https://github.com/pytorch/pytorch/pull/76661: softmax is cast up on GPUs only
    scores = torch.linspace(-8, 8, 32).view(1, 32)
    with torch.autocast("cpu", BF16):
        native = (scores @ torch.eye(32)).softmax(-1)
    with bind().autocast():
        ours = (scores @ torch.eye(32)).softmax(-1)
    exact = (scores.bfloat16().float()).softmax(-1)
    assert native.dtype is BF16 and not torch.allclose(native.float(), exact, rtol=1e-5)
    assert ours.dtype is F32 and torch.allclose(ours, exact, rtol=1e-5)


def test_cpu_layer_norm_of_a_low_input_differs_from_cudas():
    # https://github.com/pytorch/pytorch/issues/109188
    x = torch.linspace(-3, 3, 24).view(2, 12).bfloat16()
    with torch.autocast("cpu", BF16):
        assert F.layer_norm(x, (12,)).dtype is BF16
    with bind().autocast():
        assert torch.equal(F.layer_norm(x, (12,)), F.layer_norm(x.float(), (12,)))


def test_scatter_add_of_mixed_dtypes():
    # https://github.com/pytorch/pytorch/issues/51730
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(2, 2), nn.Linear(2, 2), nn.LayerNorm(2)

        def forward(self, x, y):
            x, y = self.a(x), self.b(y)
            for _ in range(2):
                index = torch.zeros_like(x, dtype=torch.int64)
                x = self.norm(torch.zeros_like(x).scatter_add(0, index, y))
            return x

    model, x = Twice(), torch.ones(2, 2)
    with torch.autocast("cpu", BF16), pytest.raises(RuntimeError, match="dtype"):
        model(x.bfloat16(), x)
        torch.zeros(2, 2).scatter_add(0, torch.zeros(2, 2).long(), x.bfloat16())
    with bind().autocast():
        assert model(x, x).dtype is F32


@pytest.mark.parametrize("in_place", [False, True])
def test_index_add_of_mixed_dtypes(in_place):
    # https://github.com/NVIDIA/apex/issues/455
    index, low = torch.tensor([0, 0, 1]), torch.ones(3, 2, dtype=BF16)
    with torch.autocast("cpu", BF16), pytest.raises(RuntimeError, match="index_add"):
        torch.zeros(2, 2).index_add(0, index, low)
    with bind().autocast():
        zeros = torch.zeros(2, 2)
        out = zeros.index_add_(0, index, low) if in_place else zeros.index_add(0, index, low)
    assert out.dtype is F32 and out[:, 0].tolist() == [2.0, 1.0]


def test_rows_written_by_a_mask():
    # https://github.com/kornia/kornia/issues/1737: Index put requires the source and destination dtypes match
    out, mask = torch.zeros(3, 4), torch.tensor([True, False, True])
    with torch.autocast("cpu", BF16), pytest.raises(RuntimeError, match="Index put"):
        out[mask] = torch.ones(2, 4) @ torch.ones(4, 4)
    with bind().autocast():
        out[mask] = torch.ones(2, 4) @ torch.ones(4, 4)
        assert torch.index_put(out, (torch.tensor([1]),), torch.ones(4, dtype=BF16)).dtype is F32
    assert out[:, 0].tolist() == [4.0, 0.0, 4.0]


def test_masked_scatter_of_mixed_dtypes():
    # https://github.com/pytorch/pytorch/issues/81876
    x, mask = torch.zeros(2, 2), torch.tensor([[True, False], [False, True]])
    with torch.autocast("cpu", BF16), pytest.raises(RuntimeError, match="masked_scatter"):
        x.masked_scatter(mask, torch.ones(4, dtype=BF16))
    with bind().autocast():
        assert x.masked_scatter(mask, torch.ones(4, dtype=BF16)).sum() == 2
        assert x.masked_scatter_(mask, torch.ones(4, dtype=BF16)).dtype is F32


@pytest.mark.parametrize("value", [-1e8, -1e9, -1e10, -1e20])
def test_masks_filled_with_a_number_that_float16_has_not(value):
    # https://github.com/facebookresearch/fairseq/issues/3575, https://github.com/NVIDIA/apex/issues/93
    # https://github.com/bentrevett/pytorch-seq2seq/issues/191
    scores, mask = torch.ones(1, 2, 2), torch.tensor([[[True, True], [False, True]]])
    with torch.autocast("cpu", F16), pytest.raises(RuntimeError, match="overflow"):
        torch.bmm(scores, scores).masked_fill(mask, value)
    with bind("mixed_float16").autocast():
        weights = torch.bmm(scores, scores).masked_fill(mask, value).softmax(-1)
    assert torch.equal(weights, torch.tensor([[[0.5, 0.5], [1.0, 0.0]]]))


def test_the_lowest_number_of_the_dtype_as_a_mask():
    # https://github.com/huggingface/transformers/pull/17306: finfo.min plus a score is -inf, and a row of them NaN
    low = torch.finfo(F16).min
    scores, mask = torch.full((1, 2), -32.0, dtype=F16), torch.full((1, 2), low)
    assert (scores + mask.half()).softmax(-1).isnan().all()
    with bind("mixed_float16").autocast():
        assert (scores + mask).softmax(-1).isfinite().all()  # a float32 mask: the sum is float32
        q = torch.full((1, 1, 2, 4), 3.0)
        assert F.scaled_dot_product_attention(q, -q, q, mask.expand(2, 2)).isfinite().all()


def test_validation_without_gradients_and_then_training():
    # https://github.com/pytorch/pytorch/issues/65766, https://github.com/pytorch/pytorch/issues/158232
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with bind().autocast():
        with torch.no_grad():
            layer(x)
        with torch.inference_mode():
            layer(x)
        loss = layer(x).sum()
    loss.backward()
    assert torch.equal(layer.weight.grad, torch.ones(2, 2))


def test_one_region_around_a_whole_loop_of_training():
    # https://github.com/X-GenGroup/Flow-Factory/pull/186: cached weights froze training
    def losses(region):
        w = nn.Parameter(torch.ones(1, 2))
        optimizer, found = torch.optim.SGD([w], lr=0.5), []
        with region:
            for _ in range(3):
                loss = F.linear(torch.ones(1, 2), w).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(loss.item())
        return found

    assert losses(torch.autocast("cpu", BF16)) == [2.0, 2.0, 2.0]
    assert losses(bind().autocast()) == [2.0, 1.0, 0.0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_whose_weights_were_used_before(reentrant):
    # https://github.com/pytorch/pytorch/issues/141896, https://github.com/pytorch/pytorch/issues/37730
    layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)

    def block(x):
        return F.layer_norm(layer(x), (4,)).exp()

    with bind().autocast():
        h = layer(x)
        loss = checkpoint(block, h, use_reentrant=reentrant).sum()
    loss.backward()
    found = layer.weight.grad.clone()
    layer.zero_grad()
    with bind().autocast():
        loss = block(layer(x)).sum()
    loss.backward()
    assert torch.equal(found, layer.weight.grad)


def test_losses_of_probabilities():
    # On CUDA torch.autocast refuses BCELoss; in float16 its logarithms lose what is near 1
    p = torch.tensor([0.99951171875], dtype=F16)
    with bind("mixed_float16").autocast():
        loss = F.binary_cross_entropy(p, torch.zeros(1))
    assert loss.dtype is F32 and torch.allclose(loss, -torch.log1p(-p.float()))


def test_running_sums_do_not_stand_still():
    ones = torch.ones(601, dtype=BF16)
    assert ones.cumsum(0)[-1].item() != 601  # the fault, natively and under torch.autocast on CPUs
    with bind().autocast():
        assert ones.cumsum(0)[-1] == 601
        assert torch.full((4,), 60000.0, dtype=F16).sum() == 240000


def test_distances_of_low_points():
    points = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=F16)
    with pytest.raises(RuntimeError, match="not implemented for 'Half'"):
        torch.cdist(points, points)
    with bind("mixed_float16").autocast():
        assert torch.cdist(points, points)[0, 1] == F.pairwise_distance(points[:1], points[1:], eps=0)[0] == 5.0
        assert torch.linalg.inv(torch.eye(2, dtype=F16)).dtype is F32


def test_interpolated_weights_of_an_average():
    # https://github.com/LoganBooker/prodigy-plus-schedule-free/issues/10: expected dtype Half for `end` but got float
    low, wide = torch.zeros(2, dtype=F16), torch.ones(2)
    with torch.autocast("cpu", F16), pytest.raises(RuntimeError, match="end"):
        torch.lerp(low, wide, 0.5)
    with bind("mixed_float16").autocast():
        assert torch.lerp(low, wide, 0.5).dtype is F32
        assert torch.equal(low.lerp_(wide, 0.5), torch.full((2,), 0.5, dtype=F16))


def test_affine_grids_keep_their_positions():
    # A matmul inside makes the grid of float32 parameters low: pixels of wide images fall together
    theta = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
    with torch.autocast("cpu", BF16):
        native = F.affine_grid(theta, (1, 1, 2, 1024), align_corners=False)
    with bind().autocast():
        ours = F.affine_grid(theta, (1, 1, 2, 1024), align_corners=False)
    assert native[0, 0, :, 0].unique().numel() < 1024 == ours[0, 0, :, 0].unique().numel()


def test_prelu_of_a_float32_stream_stays_so():
    prelu, x = nn.PReLU(), torch.tensor([1.0 + 2**-12])
    with torch.autocast("cpu", BF16):
        assert prelu(x).dtype is BF16
    with bind().autocast():
        assert prelu(x) == x
        assert prelu(x.bfloat16()).dtype is F32  # its slope is float32


def test_sequence_layers_train():
    layer = nn.LSTM(3, 4, batch_first=True)
    with bind().autocast():
        out, (h, c) = layer(torch.ones(2, 5, 3))
        loss = out.float().square().mean()
    loss.backward()
    assert out.dtype is h.dtype is c.dtype is BF16
    assert all(p.grad.dtype is F32 and p.grad.isfinite().all() for p in layer.parameters())
