"""Headroom's AdamW8bit in ms-swift, with the path of this file, or of a copy::

swift sft --external_plugins ms_swift.py --optimizer headroom ...
"""

from headroom.optim import AdamW8bit

try:
    from swift.optimizers import OptimizerCallback, optimizers_map
except ImportError as error:
    raise ImportError("headroom.integrations.ms_swift needs the package ms-swift") from error


class HeadroomOptimizer(OptimizerCallback):
    """Makes the optimizer, in the parameter groups of transformers' Trainer."""

    def create_optimizer(self, model=None):
        args = self.args
        betas = (args.adam_beta1, args.adam_beta2)
        options = {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}
        self.trainer.optimizer_cls_and_kwargs = AdamW8bit, options
        return super().create_optimizer(model)


optimizers_map["headroom"] = HeadroomOptimizer
