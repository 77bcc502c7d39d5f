"""What the test of torchtitan runs in a process of its own: its own sharding, with its own config object."""


def name(dtype):
    return str(dtype).removeprefix("torch.")


def work(rank, world, port, configs):
    """Shard a tiny decoder by torchtitan's function under each config; the dtypes it computes, keeps and gives."""
    import torch
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.config import TORCH_DTYPE_MAP, TrainingConfig
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    from torchtitan.tools.utils import set_default_dtype

    torch.distributed.init_process_group("gloo", rank=rank, world_size=world, init_method=f"tcp://127.0.0.1:{port}")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))

    class Decoder(torch.nn.Module):
        enable_weight_tying = False

        def __init__(self):
            super().__init__()
            self.tok_embeddings = torch.nn.Embedding(8, 4)
            self.layers = torch.nn.ModuleDict({"0": torch.nn.Linear(4, 4)})
            self.norm = torch.nn.LayerNorm(4)
            self.lm_head = torch.nn.Linear(4, 8)

        def forward(self, tokens):
            x = self.layers["0"](self.tok_embeddings(tokens))
            seen.update(linear=name(x.dtype))
            x = self.norm(x)
            seen.update(norm=name(x.dtype))
            return self.lm_head(x)

    out = []
    for config in configs:
        training = TrainingConfig(**config["training"])
        seen = {}
        with set_default_dtype(TORCH_DTYPE_MAP[training.dtype]):
            model = Decoder()
        apply_fsdp_to_decoder(
            model, mesh, TORCH_DTYPE_MAP[training.mixed_precision_param], TORCH_DTYPE_MAP[training.mixed_precision_reduce],
            pp_enabled=False,
        )  # fmt: skip
        tokens = torch.arange(8)[None]
        logits = model(tokens)
        loss = cross_entropy_loss(logits, tokens)
        loss.backward()
        grad = next(model.parameters()).grad
        out.append({**seen, "stored": name(next(model.parameters()).dtype), "grad": name(grad.dtype),
                    "logits": name(logits.dtype), "loss": name(loss.dtype)})  # fmt: skip
    torch.distributed.destroy_process_group()
    return out
