"""Checks on two ranks: gradients at ZeRO-2 and 3, the optimizer in use, and checkpoints."""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

from runtime.check.attributes import lost_attributes
from runtime.check.optimizer import elementwise, optimizer_in_use
from runtime.check.ranks import GRADIENTS
from runtime.check.tiny import Different, Tiny, Unchecked, differing, owner_of, tokens
from runtime.check.training import (
    ACCUMULATION,
    CLIP,
    CPU,
    RANKS,
    STEPS,
    PlainTraining,
    Trained,
    gradient_descent,
    json_of,
    start_engine,
    train_step,
    weights_of,
)
from runtime.checkpoint.load import load_model, open_tag
from runtime.checkpoint.tags import TagStore
from runtime.cluster.ranks import ranks_from_environment, silence_stdout
from runtime.engine import setup
from runtime.files import ROOT
from runtime.model_parts import persistent_buffers, tensors_of

LIMIT_S = 300  # of both ranks
LOSS_ATOL = 2e-5
RTOL = 1e-3  # of weights that an optimizer has stepped, relative to the largest step
LEAST_GRAD = 1e-6  # an element with less may be stepped by its rounding


class TwoRanks:
    """ranks.py in two processes, which write their results to a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes = []
        self.logs = []

        # The ranks import the same model as this process
        paths = [*filter(None, sys.path), str(ROOT)]
        for rank in range(RANKS):
            # Variables as a launcher sets them
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "LOCAL_WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "0",
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "DS_ACCELERATOR": "cpu",
                "PYTHONPATH": os.pathsep.join(paths),
            }
            log = open(folder / f"rank{rank}.log", "w", encoding="utf-8")  # noqa: SIM115
            self.logs.append(log)
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", Path(__file__).with_name("ranks.py"), folder],
                    env={**os.environ, **variables},
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                )
            )

    def wait(self) -> None:
        """Wait until both end. End the other one if one fails, which it may wait for."""
        # A rank that fails leaves the other one in a collective, so both end
        deadline = time.monotonic() + LIMIT_S
        while any(process.poll() is None for process in self.processes):
            failed = any(process.poll() for process in self.processes)
            if failed or time.monotonic() > deadline:
                self.end()
            time.sleep(0.05)
        self.end()

    def end(self) -> None:
        """Kill what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for log in self.logs:
            log.close()

    def problem(self) -> str:
        """Return the last line that a rank has printed before it failed."""
        lines = []
        for rank, process in enumerate(self.processes):
            text = (self.folder / f"rank{rank}.log").read_text(encoding="utf-8", errors="replace")
            if process.returncode and process.returncode > 0:
                lines += text.strip().splitlines()[-1:]
        return lines[0] if lines else f"the ranks did not end within {LIMIT_S} s"

    def result(self, name: str) -> Trained | None:
        """Return what the ranks have made in one way, or None if they failed before. Raises
        Unchecked if they say why there is nothing."""
        # A rank writes why a check can't be made, instead of a result
        reason = self.folder / f"{name}.txt"
        if reason.exists():
            raise Unchecked(reason.read_text(encoding="utf-8"))

        # Only tensors and numbers are in it
        file = self.folder / f"{name}.pt"
        if not file.exists():
            return None
        content = torch.load(file, weights_only=True)
        return Trained(content["losses"], content["weights"], [])


def same_gradients(tiny: Tiny, ranks: TwoRanks) -> str:
    """Check the gradients of two micro-steps on two ranks, by our reductions and by DeepSpeed's."""
    # In plain PyTorch
    plain = PlainTraining(tiny, gradient_descent, clip=0.0)
    start = weights_now(plain)
    plain.step(0)
    wanted = plain.trained.grads[0]

    # In each way of ZeRO. A step of gradient descent with a rate of 1 shows the gradient
    notes = ""
    for stage, fast in GRADIENTS:
        whose = "our" if fast else "DeepSpeed's own"
        way = f"ZeRO-{stage} with {whose} gradients"
        found = ranks.result(f"gradients-{stage}-{'fast' if fast else 'slow'}")
        if found is None and not fast:  # DeepSpeed's stage 3 refuses some graphs
            notes += f", but {way} is refused: {ranks.problem()}"
            break
        if found is None:
            raise Different(f"{way} fails: {ranks.problem()}")

        # What the step has subtracted is the gradient
        grads = {name: start[name] - weight for name, weight in found.weights.items()}
        wrong = differing(grads, wanted, rtol=1e-3)
        if wrong and stage == 2 and not fast:  # wrong if the ranks have different graphs
            notes += f", but {way}, which no run takes, has not (such as of {wrong})"
            continue
        if wrong:
            raise Different(
                f"at {way} on {RANKS} ranks the gradient of {wrong} is not plain PyTorch's: look "
                f"at {owner_of(plain.model, wrong)}, and report it"
            )
        check_losses(way, found.losses, plain.trained.losses)
    return f"{ACCUMULATION} micro-steps on {RANKS} ranks have plain PyTorch's gradients{notes}"


def weights_now(plain: PlainTraining) -> dict[str, Tensor]:
    """Return copies of the weights that are trained."""
    named = plain.model.named_parameters()
    return {name: param.detach().clone() for name, param in named if param.requires_grad}


def check_losses(way: str, found: list[float], wanted: list[float]) -> None:
    """Raise Different unless the losses of the steps are near."""
    for step, (loss, plain) in enumerate(zip(found, wanted, strict=True)):
        if not abs(loss - plain) < LOSS_ATOL:
            raise Different(
                f"at {way} the loss of step {step + 1} is {loss:.6f}, and in plain PyTorch "
                f"{plain:.6f}"
            )


def check_steps(way: str, found: Trained, plain: PlainTraining, start: dict[str, Tensor]) -> None:
    """Raise Different unless the weights went as far as those of plain PyTorch."""
    check_losses(way, found.losses, plain.trained.losses[-len(found.losses) :])

    # Elements with hardly any gradient are left out: Adam divides by it
    gone = {}
    wanted = {}
    for name, weight in plain.trained.weights.items():
        grads_of_steps = torch.stack([grads[name] for grads in plain.trained.grads])
        clear = grads_of_steps.abs().amin(0) > LEAST_GRAD
        gone[name] = torch.where(clear, found.weights[name] - start[name], 0.0)
        wanted[name] = torch.where(clear, weight - start[name], 0.0)
    wrong = differing(gone, wanted, RTOL)
    if wrong:
        raise Different(
            f"at {way} the steps of {wrong} are not those of the optimizer's own step() in plain "
            "PyTorch: look at step() of its class"
        )


def own_steps(tiny: Tiny, ranks: TwoRanks) -> str:
    """Check the steps of the optimizer in use, as our step makes them, against its own step()."""
    # The optimizer that the training script makes, with its clipping
    config = json_of(2, 1, 1, CLIP)
    name = elementwise(tiny, config)
    plain = PlainTraining(tiny, optimizer_in_use, CLIP)
    start = weights_now(plain)
    for step in range(STEPS):
        plain.step(step)
    for stage in (2, 3):
        way = f"ZeRO-{stage}"
        found = ranks.result(f"training-{stage}")
        if found is None:
            raise Different(f"training at {way} fails: {ranks.problem()}")
        check_steps(way, found, plain, start)
    return f"{STEPS} steps of {name} at ZeRO-2 and 3 are those of its own step() in plain PyTorch"


def resumed_training(tiny: Tiny, ranks: TwoRanks) -> str:
    """Check checkpoints of two ranks: what they hold, and that one rank resumes from them."""
    # What no checkpoint has
    lost = lost_attributes(tiny)
    if lost.changes_loss:
        raise Different(lost.sentence())

    # The same steps without ZeRO
    plain = PlainTraining(tiny, optimizer_in_use, CLIP)
    start = weights_now(plain)
    for step in range(STEPS):
        plain.step(step)
    for stage in (2, 3):
        if ranks.result(f"training-{stage}") is None:
            raise Unchecked(f"training at ZeRO-{stage} fails, so it saves nothing")
        check_tag(tiny, ranks.folder / f"tags-{stage}", f"ZeRO-{stage}", plain)

    # One more step, on one rank
    plain.resume_on_one_rank()
    plain.step(STEPS)
    use_one_rank()
    for stage in (2, 3):  # resumed at ZeRO-2
        found = resume(tiny, ranks.folder / f"tags-{stage}")
        check_steps(f"a resume from ZeRO-{stage} on 1 rank", found, plain, start)
    return f"saved on {RANKS} ranks, loaded, and resumed on 1 rank: names, ties, buffers and values"


def check_tag(tiny: Tiny, folder: Path, way: str, plain: PlainTraining) -> None:
    """Raise Different unless a checkpoint has the tensors of the model, and is read as it was
    saved."""
    # Its names and shapes
    reader, _ = open_tag(str(folder))
    differences = tensors_of(plain.model).differences(reader.tensors())
    if differences:
        raise Different(
            f"a checkpoint of {way} has not the tensors of the model: {', '.join(differences[:3])}"
        )

    # Its values
    loaded, _ = load_model(str(folder))
    trained = {name: param.detach() for name, param in plain.model.named_parameters()}
    trained.update(persistent_buffers(plain.model))
    found = {**dict(loaded.named_parameters()), **persistent_buffers(loaded)}
    for name, tensor in trained.items():
        if not torch.allclose(found[name].float(), tensor.float(), rtol=1e-3, atol=1e-3):
            raise Different(
                f"{name} of a checkpoint of {way} is not as it was saved: look at what "
                f"{owner_of(loaded, name)} and its __init__ do with it"
            )
    # What a checkpoint doesn't hold is made anew
    plain_logits = plain.model.eval()(tokens())
    plain.model.train()
    if not torch.allclose(loaded(tokens()), plain_logits, rtol=1e-2, atol=1e-2):
        raise Different(
            f"a model that is loaded from a checkpoint of {way} has other logits than the one that "
            "was saved: look for tensors that training changes and that are no persistent buffers"
        )


def use_one_rank() -> None:
    """Let this process be a run of one rank."""
    # A process group without a network
    if not dist.is_initialized():
        ranks_from_environment()
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    setup.setup_device(CPU, 0, json_of(2, 1, 1, CLIP))
    deepspeed.utils.logger.setLevel("ERROR")  # its warnings would be rows of the table


def resume(tiny: Tiny, folder: Path) -> Trained:
    """Load a checkpoint into an engine of one rank at ZeRO-2, and make one more step."""
    # As many sequences per step as the two ranks had
    accumulation = ACCUMULATION * RANKS
    config = json_of(2, 1, accumulation, CLIP)
    with silence_stdout():
        engine = start_engine(tiny, config, 1, optimizer_in_use, fast=True)
        store = TagStore(folder)
        engine.load(store, store.find())
        loss = train_step(engine, STEPS, 1, accumulation)
        weights = weights_of(engine)
        engine.deepspeed.destroy()
    return Trained([loss], weights, [])


def checks_of(ranks: TwoRanks) -> list[tuple[str, partial]]:
    """Return (name, check) of the checks that need two ranks."""
    return [
        ("ZeRO gradients", partial(same_gradients, ranks=ranks)),
        ("optimizer", partial(own_steps, ranks=ranks)),
        ("save and resume", partial(resumed_training, ranks=ranks)),
    ]
