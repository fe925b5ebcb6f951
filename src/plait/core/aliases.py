"""Names of options in torch, Keras, Lightning or transformers, and their names in Plait, for suggestions.

Names are written without `_` and `-`, in lower case; the first valid name is suggested.
"""

from __future__ import annotations

from collections.abc import Mapping

ALIASES: Mapping[str, tuple[str, ...]] = {
    "learningrate": ("lr",),
    "baselr": ("lr",),
    "initiallr": ("lr",),
    "epsilon": ("eps",),
    "beta1": ("betas",),
    "beta2": ("betas",),
    "decay": ("weight_decay",),
    "l2": ("weight_decay",),
    "wd": ("weight_decay",),
    "batch": ("batch_size",),
    "bs": ("batch_size",),
    "trainbatchsize": ("batch_size",),
    "perdevicetrainbatchsize": ("batch_size",),
    "droplast": ("last_batch",),
    "numworkers": ("loaders", "workers"),
    "nproc": ("workers",),
    "nprocpernode": ("workers",),
    "worldsize": ("workers",),
    "numepochs": ("epochs",),
    "nepochs": ("epochs",),
    "maxepochs": ("epochs",),
    "numtrainepochs": ("epochs",),
    "maxsteps": ("steps",),
    "numsteps": ("steps",),
    "iterations": ("steps",),
    "gradclip": ("clip_norm",),
    "gradientclip": ("clip_norm",),
    "gradientclipval": ("clip_norm",),
    "maxgradnorm": ("clip_norm",),
    "clipgradnorm": ("clip_norm",),
    "accumulategradbatches": ("accumulate",),
    "gradientaccumulationsteps": ("accumulate",),
    "scheduler": ("lr_schedule", "schedule"),
    "lrscheduler": ("lr_schedule",),
    "dataset": ("data",),
    "criterion": ("loss",),
    "lossfn": ("loss",),
    "randomseed": ("seed",),
    "manualseed": ("seed",),
    "dtype": ("precision",),
    "amp": ("precision",),
    "type": ("kind",),
    "numclasses": ("classes",),
    "outputdir": ("run_dir",),
    "outdir": ("run_dir",),
    "logdir": ("run_dir",),
    "savedir": ("run_dir",),
}
