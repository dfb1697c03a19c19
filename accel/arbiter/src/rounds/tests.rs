//! A device that does one command at a time, tenants that put commands into it, and what each gets.

use super::*;

const QUANTUM: u32 = 4_000;

/// A tenant that puts a command of so many microseconds to the device, and thinks for so long when it is done.
struct Load {
    share: Share,
    command: u64,
    thinks: u64,
}

impl Load {
    fn always(weight: u32, command: u64) -> Self {
        Self {
            share: Share {
                weight,
                priority: Priority::High,
            },
            command,
            thinks: 0,
        }
    }
}

/// What became of a load.
#[derive(Default, Clone)]
struct Got {
    used: u64,
    /// How long commands took from when they were wanted.
    latencies: Vec<u64>,
    /// When its command was wanted; none while it thinks.
    wanted: Option<u64>,
    on_device: bool,
    thinks_until: u64,
    /// Used since the arbiter looked.
    spent: u64,
}

/// Runs a serial device for so long by steps of 50 us: commands in the order in which they came, one of each tenant at a time; the arbiter
/// looks each millisecond, and when somebody has to wait.
fn run(loads: &[Load], until: u64) -> Vec<Got> {
    const STEP: usize = 50;
    let mut rounds = Rounds::new(QUANTUM);
    for (number, load) in (0..).zip(loads) {
        rounds.join(number, load.share);
    }
    let mut got = vec![Got::default(); loads.len()];
    let mut credits = vec![Credit::Unlimited; loads.len()];
    let mut device: Vec<(usize, u64)> = Vec::new();
    let (mut looked, mut poked) = (0, false);
    for now in (0..until).step_by(STEP) {
        if let Some((index, ends)) = device.first().copied()
            && ends <= now
        {
            device.remove(0);
            let (load, own) = (&loads[index], &mut got[index]);
            own.used += load.command;
            own.spent += load.command;
            own.on_device = false;
            own.latencies.extend(own.wanted.take().map(|wanted| now - wanted));
            own.thinks_until = now + load.thinks;
            if let Some((next, ends)) = device.first_mut() {
                *ends = now + loads[*next].command;
            }
        }
        for (index, own) in got.iter_mut().enumerate() {
            if own.wanted.is_none() && own.thinks_until <= now {
                own.wanted = Some(now);
            }
            let left = match credits[index] {
                Credit::Unlimited => true,
                Credit::Microseconds(left) => left > own.spent,
            };
            if own.wanted.is_some() && !own.on_device {
                if left {
                    own.on_device = true;
                    device.push((index, now + loads[index].command));
                } else {
                    poked = true;
                }
            }
        }
        if now - looked >= 1000 || poked {
            (looked, poked) = (now, false);
            for (number, own) in (0..).zip(&mut got) {
                let seen = Seen {
                    spent: std::mem::take(&mut own.spent),
                    busy: own.wanted.is_some(),
                    waits: own.wanted.is_some() && !own.on_device,
                };
                rounds.see(number, seen, now);
            }
            for (number, credit) in rounds.decide(now) {
                credits[usize::try_from(number).unwrap()] = credit;
            }
        }
    }
    got
}

/// Parts of what all have used, in thousandths.
fn parts(got: &[Got]) -> Vec<u64> {
    let all: u64 = got.iter().map(|got| got.used).sum();
    got.iter().map(|got| got.used * 1000 / all).collect()
}

#[track_caller]
fn near(value: u64, expected: u64, off: u64) {
    assert!(value.abs_diff(expected) <= off, "{value} is not {expected} +- {off}");
}

const SECOND: u64 = 1_000_000;

#[test]
fn saturating_tenants_have_their_shares_whatever_their_commands_are() {
    for (loads, expected) in [
        (vec![Load::always(1, 1000), Load::always(1, 1000)], vec![500, 500]),
        (vec![Load::always(1, 1000), Load::always(3, 1000)], vec![250, 750]),
        // Commands of one are a hundred times as long, and longer than its quantum.
        (vec![Load::always(1, 20_000), Load::always(3, 200)], vec![250, 750]),
        (vec![Load::always(3, 200), Load::always(1, 9_000)], vec![750, 250]),
        (
            vec![Load::always(1, 500), Load::always(2, 3000), Load::always(5, 700)],
            vec![125, 250, 625],
        ),
    ] {
        let got = run(&loads, 10 * SECOND);
        for (part, expected) in parts(&got).into_iter().zip(expected) {
            near(part, expected, 10);
        }
        // Nothing of the device's time is lost but what a step is.
        let used: u64 = got.iter().map(|got| got.used).sum();
        assert!(used > 93 * SECOND / 10, "{used}");
    }
}

#[test]
fn only_proportions_of_weights_count() {
    for (loads, expected) in [
        (vec![Load::always(100, 1000), Load::always(300, 1000)], vec![250, 750]),
        (vec![Load::always(1000, 1000), Load::always(1000, 3000)], vec![500, 500]),
        (vec![Load::always(10, 2000), Load::always(1000, 500)], vec![10, 990]),
    ] {
        let got = run(&loads, 20 * SECOND);
        for (part, expected) in parts(&got).into_iter().zip(expected) {
            near(part, expected, 10);
        }
        let used: u64 = got.iter().map(|got| got.used).sum();
        assert!(used > 93 * 2 * SECOND / 10, "{used}");
    }
}

#[test]
fn a_great_weight_makes_others_wait_for_a_tenth_of_a_second_at_most() {
    let of = |weights: &[i64]| {
        let each = Each::of(QUANTUM.into(), weights.iter().copied());
        weights.iter().map(|weight| each.credit(*weight)).collect::<Vec<_>>()
    };
    assert_eq!(of(&[100, 100]), [4000, 4000]);
    assert_eq!(of(&[1, 3]), of(&[300, 900]));
    assert_eq!(of(&[1, 25]), [4000, 100_000]);
    assert_eq!(of(&[1, 1000]), [100, 100_000]);
    // Of one that is not busy yet, and has a weight that no busy one has.
    assert_eq!(Each::of(QUANTUM.into(), [1, 2].into_iter()).credit(1000), 100_000);
    assert_eq!(Each::of(QUANTUM.into(), [1000].into_iter()).credit(0), 1);
}

#[test]
fn who_uses_less_than_its_share_leaves_the_rest_and_waits_for_one_command() {
    let small = Load {
        thinks: 9_000,
        ..Load::always(1, 1000)
    };
    let got = run(&[small, Load::always(1, 3000)], 10 * SECOND);
    let mut latencies = got[0].latencies.clone();
    latencies.sort_unstable();
    let high = latencies[latencies.len() * 99 / 100];
    // Its own, and the rest of the neighbour's.
    assert!(high <= 4_100, "{high}");
    let used: u64 = got.iter().map(|got| got.used).sum();
    assert!(used > 96 * SECOND / 10, "{used}");
}

#[test]
fn who_is_alone_is_never_held_up() {
    let mut rounds = Rounds::new(QUANTUM);
    rounds.join(1, Share::default());
    rounds.join(2, Share::default());
    let busy = |spent| Seen {
        spent,
        busy: true,
        waits: false,
    };
    for now in (0..SECOND).step_by(1000) {
        rounds.see(1, busy(1000), now);
        rounds.see(2, Seen::default(), now);
        assert_eq!(rounds.decide(now)[0], (1, Credit::Unlimited));
    }
    // And owes nothing for it when another one comes.
    rounds.see(2, busy(0), SECOND);
    let credits = rounds.decide(SECOND);
    assert_eq!(
        credits,
        [(1, Credit::Microseconds(4000)), (2, Credit::Microseconds(4000))]
    );
    assert!(rounds.is_contended());
    // Until that is gone, or has not been busy for a while.
    rounds.keep(|tenant| tenant != 2);
    assert_eq!(rounds.decide(SECOND + 1), [(1, Credit::Unlimited)]);
}

#[test]
fn a_long_command_is_a_debt_that_sleep_does_not_forgive() {
    // Half a second at a time, and rests of 60 ms in which the other one is alone: still no more than its half.
    let long = Load {
        thinks: 60_000,
        ..Load::always(1, 500_000)
    };
    let got = run(&[long, Load::always(1, 1000)], 20 * SECOND);
    assert!(parts(&got)[0] <= 530, "{:?}", parts(&got));
}

#[test]
fn a_tenant_that_keeps_its_credit_holds_nobody_up_for_long() {
    let mut rounds = Rounds::new(QUANTUM);
    rounds.join(1, Share::default());
    rounds.join(2, Share::default());
    let (mut used, mut left, mut waits) = (0_u64, 0_u64, false);
    for now in (0..SECOND).step_by(1000) {
        let spent = left.min(1000);
        used += spent;
        waits |= left <= spent;
        let seen = Seen {
            spent,
            busy: true,
            waits,
        };
        rounds.see(1, seen, now);
        // It says that it is busy, and uses nothing.
        let liar = Seen {
            spent: 0,
            busy: true,
            waits: false,
        };
        rounds.see(2, liar, now);
        left = match rounds.decide(now)[0].1 {
            Credit::Microseconds(left) => left,
            Credit::Unlimited => panic!("two are busy"),
        };
        waits = left == 0;
    }
    // A round is 8 ms of credit, and ends after 16 ms: 4 of 16.
    assert!(used >= SECOND / 5, "{used}");
}

#[test]
fn low_priority_has_what_high_priority_leaves() {
    let low = |command| Load {
        share: Share {
            weight: 1,
            priority: Priority::Low,
        },
        ..Load::always(1, command)
    };
    let got = run(&[Load::always(1, 1000), low(1000)], 10 * SECOND);
    assert!(parts(&got)[1] <= 10, "{:?}", parts(&got));
    let half = Load {
        thinks: 10_000,
        ..Load::always(1, 10_000)
    };
    let got = run(&[half, low(500)], 10 * SECOND);
    assert!((400..=500).contains(&parts(&got)[1]), "{:?}", parts(&got));
}
