"""ASU: self-distillation from a teacher with smoothed attention (arXiv 2603.01285).

L_f = E_{D_f} [ 1/T sum_t KL( p(.|x, y_<t; theta_0, tau) || p(.|x, y_<t; theta) ) ]
ASU_GD: L = lambda L_f + CE on D_r        ASU_KL: L = lambda L_f + KL(theta_0 || theta) on D_r
"""

from __future__ import annotations

from asu_interp.unlearning.objectives.step import Losses, Step


def asu_gd(step: Step) -> Losses:
    return Losses(forget=step.forget.kl_from(step.teacher()), retain=step.retain.nll)


def asu_kl(step: Step) -> Losses:
    return Losses(forget=step.forget.kl_from(step.teacher()), retain=step.retain.kl_from(step.reference()))
