"""The loss in chunks, with LMHead as it is and as researchers edit it, against plain PyTorch over full logits."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from model import GPT, GPTConfig, LMHead
from runtime import loss as loss_module
from runtime.errors import UserError
from runtime.loss import check_by_hand, cross_entropy_with_grad

VOCAB, EMBD, ROWS = 61, 32, 50  # 61 is padded to 64


def cross_entropy(logits, targets):
    return F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")


class Softcapped(LMHead):
    def logits(self, x):
        return 15 * torch.tanh(super().logits(x) / 15)


class Smoothed(LMHead):
    def losses(self, x, targets):
        return F.cross_entropy(self.logits(x).float(), targets, ignore_index=-1, reduction="none",
                               label_smoothing=0.1)


class WithZLoss(LMHead):
    """Also of rows that don't count: chunked_loss leaves those out."""

    def losses(self, x, targets):
        return super().losses(x, targets) + 1e-2 * self.logits(x).float().logsumexp(dim=1) ** 2


class Scaled(LMHead):
    def forward(self, x, targets=None, reduction="mean"):
        return super().forward(x * 4, targets, reduction)


class WithBias(LMHead):
    """Not tied, with a bias, and a layer before it."""

    def __init__(self, wte, vocab_size):
        super().__init__(wte, vocab_size)
        self.weight = nn.Parameter(wte.weight.detach() + 0.1)
        self.bias = nn.Parameter(torch.linspace(-1, 1, len(wte.weight)))
        self.proj = nn.Linear(EMBD, EMBD)

    def logits(self, x):
        return F.linear(self.proj(x), self.weight, self.bias)[..., : self.vocab_size]


def full_logits(head, x):
    """What these heads compute, written again."""
    if isinstance(head, Scaled):
        x = x * 4
    if isinstance(head, WithBias):
        return (head.proj(x) @ head.weight.T + head.bias)[:, :VOCAB]
    logits = (x @ head.weight.T)[:, :VOCAB]
    return 15 * torch.tanh(logits / 15) if isinstance(head, Softcapped) else logits


def plain_losses(head, x, targets):
    """Of the rows that count."""
    logits = full_logits(head, x)[targets >= 0]
    own = targets[targets >= 0]
    if isinstance(head, Smoothed):
        return 0.9 * cross_entropy(logits, own) - 0.1 * logits.log_softmax(dim=1).mean(dim=1)
    losses = cross_entropy(logits, own)
    return losses + 1e-2 * logits.logsumexp(dim=1) ** 2 if isinstance(head, WithZLoss) else losses


HEADS = [LMHead, Softcapped, Smoothed, WithZLoss, Scaled, WithBias]


def make_head(kind, scale=0.3):
    torch.manual_seed(0)
    wte = nn.Embedding(64, EMBD)
    wte.weight.data *= scale
    return kind(wte, VOCAB)


def make_rows(seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, ROWS // 2, EMBD, generator=generator)
    targets = torch.randint(VOCAB, (2, ROWS // 2), generator=generator)
    targets[:, ::3] = -1
    return x, targets


def gradients(head, x, loss):
    """[gradient] of x and of each parameter of the head."""
    return torch.autograd.grad(loss, [x, *head.parameters()])


@pytest.mark.parametrize("rows", [1, 7, 4096])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", HEADS)
def test_loss_and_gradients_are_those_over_full_logits(kind, reduction, rows, monkeypatch):
    """Seen: 2e-7 of gradients up to 1."""
    monkeypatch.setattr(loss_module, "EAGER_LOSS_CHUNK", rows)
    head = make_head(kind)
    x, targets = make_rows()
    x.requires_grad_()
    wanted = plain_losses(head, x.flatten(0, 1), targets.flatten())
    wanted = wanted.mean() if reduction == "mean" else wanted.sum() / 40
    loss = head(x, targets, reduction)
    loss = loss / 40 if reduction == "sum" else loss
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6) and loss > 1
    for mine, exact in zip(gradients(head, x, 3 * loss), gradients(head, x, 3 * wanted), strict=True):
        assert mine.dtype == exact.dtype and exact.abs().max() > 1e-3
        assert (mine - exact).abs().max() < 1e-6 * max(1, exact.abs().max())


@pytest.mark.parametrize("kind", HEADS)
def test_loss_of_each_row(kind):
    head = make_head(kind)
    x, targets = make_rows()
    losses = head(x, targets, "none")
    assert losses.shape == (ROWS,) and (losses[targets.flatten() < 0] == 0).all()
    wanted = plain_losses(head, x.flatten(0, 1), targets.flatten())
    assert torch.allclose(losses[targets.flatten() >= 0], wanted, atol=1e-5)
    assert torch.allclose(head(x), full_logits(head, x.flatten(0, 1)).view(2, -1, VOCAB), atol=1e-5)


@pytest.mark.parametrize("dtype, error", [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("kind", HEADS)
def test_gradients_in_half_precision(kind, dtype, error):
    """Of the head, in float32 sums, and of its input, against float64. Without FP16_GRAD_FACTOR float16's gradients of
    1e-6 here would be multiples of 6e-8."""
    head = make_head(kind, 0.1).to(dtype)
    exact_head = make_head(kind, 0.1)
    exact_head.load_state_dict(head.state_dict())
    exact_head.double()
    x, targets = make_rows()
    x = (0.5 * x).to(dtype).requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    # As float16's loss scale, divided by the tokens of a large micro-batch
    scale = 1024.0 if dtype == torch.float16 else 1.0
    mine = gradients(head, x, scale * head(x, targets))
    exact = gradients(exact_head, exact_x, scale * plain_losses(
        exact_head, exact_x.flatten(0, 1), targets.flatten()).mean())
    for one, other in zip(mine, exact, strict=True):
        assert one.dtype == dtype and (one.double() - other).norm() < error * other.norm()


@pytest.mark.parametrize("kind", HEADS)
def test_the_full_logits_are_never_in_memory(kind, monkeypatch):
    """7 rows at most are multiplied by the head's matrix at once, or given to the hand-written loss."""
    monkeypatch.setattr(loss_module, "EAGER_LOSS_CHUNK", 7)
    linear, rows = F.linear, []

    def watched_linear(x, weight, bias=None):
        rows.append(len(x))
        return linear(x, weight, bias)

    def watched_loss(logits, *args):
        rows.append(len(logits))
        return cross_entropy_with_grad(logits, *args)

    monkeypatch.setattr(F, "linear", watched_linear)
    monkeypatch.setattr(loss_module, "cross_entropy_with_grad", watched_loss)
    x, targets = make_rows()
    make_head(kind)(x, targets).backward()
    assert max(rows) == 7 and min(rows) == 1


def test_hooks_on_parameters_see_the_whole_gradient_once(monkeypatch):
    monkeypatch.setattr(loss_module, "EAGER_LOSS_CHUNK", 7)
    head = make_head(Softcapped)
    x, targets = make_rows()
    head(x, targets).backward()
    plain = head.weight.grad
    head.weight.grad = None
    head.weight.register_hook(lambda grad: 10 * grad)
    head(x, targets).backward()
    assert torch.allclose(head.weight.grad, 10 * plain, atol=1e-6)


def test_a_function_of_one_head_counts(monkeypatch):
    """Set on the object, not on the class."""
    head = make_head(LMHead)
    x, targets = make_rows()
    plain = head(x, targets)
    head.losses = lambda rows, own: 2 * LMHead.losses(head, rows, own)
    assert head(x, targets).item() == pytest.approx(2 * plain.item(), rel=1e-6)


def test_a_tensor_outside_the_head_is_refused():
    """It would get no gradient."""
    outside = nn.Parameter(torch.ones(EMBD))

    class Head(LMHead):
        def logits(self, x):
            return super().logits(x * outside)

    x, targets = make_rows()
    with pytest.raises(UserError, match=r"uses a tensor of shape \(32,\) outside the head"):
        make_head(Head)(x.requires_grad_(), targets)


def test_a_hand_written_gradient_that_is_not_of_its_loss_is_refused():
    """A soft cap in the loss alone: its gradients were 59% off."""

    def softcapped(logits, targets, vocab_size):
        losses, _ = cross_entropy_with_grad(15 * torch.tanh(logits / 15), targets, vocab_size)
        return losses, cross_entropy_with_grad(logits, targets, vocab_size)[1]

    check_by_hand(cross_entropy_with_grad)
    with pytest.raises(UserError, match="edit LMHead.losses in model.py instead"):
        check_by_hand(softcapped)


@pytest.mark.parametrize("kind", [LMHead, Softcapped])
def test_a_model_that_is_compiled_as_a_whole_has_the_same_gradients(kind):
    """As in nanoGPT's train.py. All gradients were zero, without a word."""
    model = GPT(GPTConfig(block_size=16, vocab_size=VOCAB, n_layer=1, n_head=2, n_embd=EMBD))
    model.lm_head = kind(model.transformer.wte, VOCAB)
    idx = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))
    found = []
    for forward in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        loss = forward(idx, idx)
        loss.backward()
        found.append((loss.item(), [param.grad.clone() for param in model.parameters()]))
    (loss, grads), (compiled_loss, compiled_grads) = found
    assert compiled_loss == pytest.approx(loss, rel=1e-6)
    assert max(grad.abs().max() for grad in grads) > 1e-3
    for grad, compiled in zip(grads, compiled_grads, strict=True):
        assert (compiled - grad).abs().max() < 1e-6


@pytest.mark.parametrize("kind", [LMHead, Softcapped, WithBias])
def test_compiled_chunks_give_the_same(kind):
    """As GPT.compile_blocks compiles them; a function that was replaced afterwards is not skipped."""
    model = GPT(GPTConfig(block_size=16, vocab_size=VOCAB, n_layer=1, n_head=2, n_embd=EMBD))
    model.lm_head = kind(model.transformer.wte, VOCAB)
    idx = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))

    def run():
        model.zero_grad()
        loss = model(idx, idx)
        loss.backward()
        return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}

    loss, grads = run()
    compiled = []
    model.compile_blocks(backend=lambda graph, inputs: compiled.append(1) or graph)
    compiled_loss, compiled_grads = run()
    assert len(compiled) == 2 and compiled_loss == pytest.approx(loss, rel=1e-6)
    for name, grad in grads.items():
        assert (compiled_grads[name] - grad).abs().max() < 1e-6
    model.lm_head.losses = lambda rows, own: 2 * kind.losses(model.lm_head, rows, own)
    assert run()[0] == pytest.approx(2 * loss, rel=1e-6)
