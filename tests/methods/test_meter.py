"""Counts of the masses that decode steps hold, by hand."""

import numpy as np

from tamis.jit_kernels.contract.ops.select.metered import ALL, WIDER, WITHIN
from tamis.select.meter import NOT_MEASURED, Meter, mass_of


def step(meter, *heads):
    """A step in which each head of the first layer reports mass, held and needed."""
    meter.report[0] = heads
    meter.take()


def test_a_step_counts_heads_that_were_measured_and_is_then_dropped():
    meter = Meter(2, 2)
    step(meter, (0.5, 0.875, WIDER), (0.75, 1.0, ALL))
    assert (meter.report == NOT_MEASURED).all()
    np.testing.assert_array_equal(meter.last[0], [(0.5, 0.875, WIDER), (0.75, 1.0, ALL)])
    assert (meter.last[1] == NOT_MEASURED).all()
    found = mass_of([meter])
    assert found[:2] == (1, (0.875 + 1.0) / 2)
    assert found.mass_p5 == 0.875
    assert found[3:] == ((0.5 + 0.75) / 2, 0.5, 0.5)
    assert found.escalated == 1.0
    expected = {
        "steps": 1, "mass": 0.9375, "mass_p5": 0.875, "chosen_mass": 0.625, "escalated": 1.0,
        "dense": 0.5,
    }  # fmt: skip
    assert found.rounded() == expected


def test_steps_that_measure_nothing_are_none():
    meter = Meter(1, 1)
    step(meter, (NOT_MEASURED, 0.5, WITHIN))
    assert mass_of([meter]) is None
    step(meter, (0.0, 0.0, WITHIN))  # a mass of zero is one
    assert mass_of([meter])[:2] == (1, 0.0)
    meter.reset()
    assert mass_of([meter]) is None


def test_one_in_twenty_holds_less_than_the_quantile():
    meter = Meter(1, 20)
    for n_low, expected in ((0, 1.0), (1, 1.0), (2, 0.25)):
        meter.reset()
        step(meter, *[(0.25, 0.25, WITHIN)] * n_low, *[(1.0, 1.0, WITHIN)] * (20 - n_low))
        assert mass_of([meter]).mass_p5 == expected


def test_masses_of_devices_are_of_the_same_steps():
    one, other = Meter(1, 1), Meter(1, 1)
    step(one, (1.0, 1.0, WITHIN))
    step(one, (0.5, 0.5, WITHIN))
    step(other, (0.25, 0.25, WITHIN))
    found = mass_of([one, other])
    assert (found.n_step, found.mass, found.escalated) == (2, 1.75 / 3, 0.0)
    assert mass_of([Meter(1, 1), other]).mass == 0.25


def test_what_is_said_has_shares_in_percent():
    meter = Meter(1, 4)
    step(meter, (0.5, 0.5, WITHIN), (0.5, 0.5, WIDER), (0.5, 0.5, ALL), (0.5, 0.5, WITHIN))
    said = "holds an estimated 0.500 of attention, 95 % of the heads at least 0.500; "
    assert str(mass_of([meter])) == said + "50% of them read more, 25% all"
