"""Set-up of the import of a torchvision that was compiled for another build of torch.

It is where make puts it, with what needs it. It cannot be loaded, and its import ends where it gives two of its
operators a shape, unless they exist.
"""

import site
import sys
from pathlib import Path

import torch

VISION = Path(sys.prefix) / "vision"
site.addsitedir(str(VISION))
for _compiled in VISION.glob("torchvision/_C.*"):
    try:
        torch.ops.load_library(_compiled)
    except OSError:
        _operators = torch.library.Library("torchvision", "FRAGMENT")
        for _name in ("nms", "qnms"):
            _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
