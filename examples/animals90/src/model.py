"""ResNet-18 (arXiv:1512.03385) from transformers, with batch norms for half precision and recomputation."""

import functools
import os
import pickle
import sys
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import ResNetConfig, ResNetForImageClassification
from transformers.modeling_utils import load_state_dict

sys.path.append(str(Path(__file__).resolve().parents[3]))  # the project, for who imports this module alone

from runtime.output import printable
from runtime.torch_files import check_torch_file
from runtime.untrusted import open_regular

MAX_WEIGHTS_BYTES = 4_000_000_000  # 45 MB with 90 classes; an optimizer's state may be in the same file


class BatchNorm(nn.BatchNorm2d):
    """BatchNorm2d whose running statistics stay in float32, and don't move when backward recomputes activations."""

    def forward(self, x):
        """Normalize x of shape (batch, channels, height, width)."""
        recomputing = torch._C._current_graph_task_id() != -1  # inside of backward
        self.num_batches_tracked.add_(self.training and not recomputing)
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight.float(), self.bias.float(),
                                        self.training, 0.0 if recomputing else self.momentum, self.eps)

    def _apply(self, fn, recurse=True):
        """Move or convert this module, but don't round the statistics, as half() would: buffers only move."""
        return super()._apply(lambda t: fn(t) if isinstance(t, nn.Parameter) else t.to(fn(t).device), recurse)


class ResNet18Animals90(ResNetForImageClassification):
    """ResNet-18. pretrained: True (ImageNet's weights from the hub), False (random) or a path. Raises OSError."""

    def __init__(self, num_classes=90, pretrained=True):
        super().__init__(ResNetConfig(layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512],
                                      num_labels=num_classes))
        for module in self.modules():
            if type(module) is nn.BatchNorm2d:
                module.__class__ = BatchNorm
        if pretrained:
            self.copy_weights("microsoft/resnet-18" if pretrained is True else pretrained)

    def forward(self, x):
        """Return the logits (batch, classes) in float32 of pictures (batch, 3, height, width)."""
        return super().forward(x).logits.float()

    def copy_weights(self, source):
        """Copy safe weights of a file, folder or the hub. A last layer of another size is random.

        Raises OSError.
        """
        try:
            if not os.path.exists(source):
                source = snapshot_download(source, allow_patterns="model.safetensors")
            file = os.path.join(source, "model.safetensors") if os.path.isdir(source) else source
            with open_regular(file, MAX_WEIGHTS_BYTES) as content:
                if not str(file).endswith(".safetensors"):
                    check_torch_file(content)
            weights = load_state_dict(file)
            weights = weights.get("module", weights)  # where DeepSpeed has them
            if len(weights.get("classifier.1.bias", ())) != self.config.num_labels:
                for name, tensor in self.classifier.state_dict().items():
                    weights[f"classifier.{name}"] = tensor
            self.load_state_dict(weights)
        except Exception as error:  # of the hub, httpx, safetensors, pickle and PyTorch: they have no common base
            why = " ".join(printable(str(error)).split())[:200]
            if isinstance(error, pickle.UnpicklingError):  # its message advises to let the file run code
                why = "it is damaged, or contains what could run code"
            raise OSError(
                f"pretrained={source} isn't available or doesn't fit ({why}): use --pretrained PATH, "
                "a folder with model.safetensors, or --pretrained none"
            ) from None

    def recompute_activations(self):
        """Keep only the input of each of the eight blocks, and compute the rest again in backward."""
        for stage in self.resnet.encoder.stages:
            for block in stage.layers:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
