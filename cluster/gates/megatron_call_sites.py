"""Call sites on the layers of Megatron Core reach the record, and are exact under its tensor parallelism."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import telemetry
from launch.gates import Gate, Needs, Trial
from launch.gates.comparison import EXACTNESS, compare_record
from launch.gates.gathered import Reference, gather_parts, take_first
from launch.gates.model import VOCABULARY, make_tokens
from launch.gates.ranks import run_on_ranks, start_ranks
from telemetry.integrations import megatron

GATE = Gate(
    name="megatron-call-sites",
    purpose="call sites, gradients and parameters of a Megatron Core model under tensor parallelism are exact",
    procedure=(
        "Megatron Core's GPTModel trains three iterations of two micro-batches, its layers split over tp, dp being 2 "
        "from four ranks on. The session is driven as Megatron's loop would drive it, and its layout is Megatron's "
        "process groups. Call sites show the residual stream of each layer, and the logits, which are split over the "
        "vocabulary; where Megatron has call sites of its own, those do. What they show is gathered over the ranks "
        "that hold different elements, parameters and gradients over tp. Each field of the record is compared with the "
        "summary of that in one process."
    ),
    needs=Needs(
        gpus_per_node=2, modules={"megatron.core": "pip install --no-deps megatron-core (leaves torch as it is)"}
    ),
    limits=EXACTNESS,
    rehearsal="Megatron's layers, groups and marks on the CPU; not its kernels, nor its sequence parallelism",
    deadline_s=240.0,
)
SPECS = ("residual_accumulator:1", "residual_contribution:1", "output_logits:1", "gradients:1", "parameters:1")
ITERATIONS, MICRO_BATCHES, LENGTH = 3, 2, 8


def run(trial: Trial) -> Mapping[str, object]:
    """Start the ranks and return the comparison."""
    return start_ranks(trial)


def measure(device: torch.device, to: Path) -> dict[str, object]:
    """Train observed, gather, and compare; every rank runs this, and the result counts on rank zero."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    world_size = dist.get_world_size()
    num_data = 2 if world_size >= 4 and world_size % 2 == 0 else 1
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size // num_data)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = make_model(world_size // num_data).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reference, shown = Reference(), Shown(model)
    observer = megatron.build(SPECS, to=to, hist_every=1)
    assert observer is not None, "there are specs"
    for iteration in range(ITERATIONS):
        known = {"model": [model], "iteration": iteration, "pg_collection": groups}
        optimizer.zero_grad()
        with observer.observe_forward_backward(**known):
            for part in range(MICRO_BATCHES):
                loss_of_batch(model, MICRO_BATCHES * iteration + part, groups.dp.rank(), device).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, "every parameter of the model takes part in the loss"
            dist.all_reduce(parameter.grad, group=groups.dp)
            for kind, tensor in (("gradient", parameter.grad), ("parameter", parameter)):
                reference.add((iteration + 1, kind, name), whole(parameter, tensor, groups.tp))
        shown.add_to(reference, iteration + 1, groups.dp)
        observer(optimizer=optimizer, **known)
        optimizer.step()
    observer.close()
    parallel_state.destroy_model_parallel()
    return compare_record(to, reference.summaries) if dist.get_rank() == 0 else {}


class TorchAttention(nn.Module):
    """Causal attention by torch in the place of Megatron's own kernels, so that the model also runs on a CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Map ``[time, batch, heads, width]`` each to ``[time, batch, heads * width]``."""
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        return scaled_dot_product_attention(query, key, value, is_causal=True).permute(2, 0, 1, 3).flatten(2)


def make_model(tensor_size: int) -> nn.Module:
    """Make a GPT of Megatron Core with the same weights on every rank of dp."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=8 * tensor_size,
        num_attention_heads=2 * tensor_size,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
    )
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = TorchAttention
    model: nn.Module = GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY * tensor_size,
        max_sequence_length=LENGTH,
        parallel_output=True,
        share_embeddings_and_output_weights=False,
    )
    return model


def loss_of_batch(model: nn.Module, number: int, data_rank: int, device: torch.device) -> Tensor:
    """Return the mean cross entropy of a batch, whose size differs over dp."""
    tokens, labels = (part.to(device) for part in make_tokens(number, data_rank, 2 + data_rank % 3, LENGTH))
    positions = torch.arange(LENGTH, device=device).expand_as(tokens)
    loss: Tensor = model(tokens, positions, None, labels=labels).mean()
    return loss


class Shown:
    """The call sites: hooks on Megatron's layers that show a tensor and keep a copy for the reference."""

    def __init__(self, model: nn.Module) -> None:
        # Newer versions have call sites in their layers; a second one would count everything twice.
        self._has_own = importlib.util.find_spec("megatron.core.tensor_observation") is not None
        self._seen: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
        for name, module in model.named_modules():
            if type(module).__name__ == "TransformerLayer":
                module.register_forward_hook(self._residuals(name), with_kwargs=True)
        model.get_submodule("output_layer").register_forward_hook(self._logits)

    def _residuals(self, name: str) -> Any:
        def show(layer: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
            entering, leaving = kwargs.get("hidden_states", args[0] if args else None), output[0]
            if not self._has_own:
                telemetry.observe_layer_residuals(layer, entering, leaving)
            self._keep("residual_accumulator", name, entering)
            self._keep("residual_contribution", name, leaving.detach() - entering.detach())

        return show

    def _logits(self, layer: nn.Module, args: Any, output: Any) -> None:
        if not self._has_own:
            dims: dict[str, Any] = {"tp_shard_dim": 2, "sequence_dim": 0, "batch_dim": 1}
            telemetry.observe_tensor(layer, "output_logits", "output_logits", output[0], **dims)
        self._keep("output_logits", "output_layer", output[0])

    def _keep(self, kind: str, owner: str, tensor: Tensor) -> None:
        self._seen[kind, f"{owner}.{kind}"].append(tensor.detach().clone())

    def add_to(self, reference: Reference, step: int, data_group: dist.ProcessGroup) -> None:
        """Gather what was shown, and forget it; every rank calls this."""
        for kind, site in sorted(self._seen):
            # Without sequence parallelism every rank of tp has the whole residual stream.
            group = None if kind == "output_logits" else data_group
            whole_ones = [gather_parts(part, group) for part in self._seen[kind, site]]
            reference.add((step, kind, site), torch.cat(whole_ones))
        self._seen.clear()


def whole(parameter: nn.Parameter, tensor: Tensor, tensor_group: dist.ProcessGroup) -> Tensor:
    """Return all elements of a parameter or its gradient, which Megatron's mark says how to gather."""
    is_split = getattr(parameter, "tensor_model_parallel", False)
    return gather_parts(tensor, tensor_group) if is_split else take_first(tensor)


if __name__ == "__main__":
    run_on_ranks(measure)
