//! Every use case that fails, with its undo failing, too: the first error is told, and what is left goes with the next try, or with the
//! next daemon.

use super::Attempt;
use node_api::State;

use super::World;
use super::cases::{Case, MOST, check, each};
use super::faults::{Fault, INJECTED, INJECTED_AGAIN};
use super::processes::RESTORE;
use crate::error::words::with_causes;

/// So many calls after one that was refused and did no harm.
const TRIED_AGAIN: usize = 2;

/// One that was there before may have lost its machine.
const LEFT: &[Option<State>] = &[
    Some(State::Running),
    Some(State::Paused),
    Some(State::Suspended),
    Some(State::Exited),
];

/// A case with calls refused at places of these numbers; what was refused.
fn attempt(case: &Case, numbers: &[usize]) -> (World, Attempt, Vec<String>) {
    let mut world = World::new();
    (case.prepare)(&mut world);
    let faults: Vec<_> = numbers.iter().map(|&number| (number, Fault::Refused)).collect();
    world.faults.arm(&faults);
    let attempt = world.attempt(case.act);
    let refused = world.faults.disarm();
    (world, attempt, refused)
}

/// Goes through the places of a case at which it fails, and at each through all that it calls then, each in a world of its own; how many
/// there are.
fn every_undo(case: &Case) -> usize {
    let mut undos = 0;
    let undone = match case.lasts {
        true => LEFT,
        false => case.undone,
    };
    let case = &Case { undone, ..*case };
    for first in 0..MOST {
        let (world, alone, refused_alone) = attempt(case, &[first]);
        let ends = world.is_at_rest().and_then(|()| world.ends_empty());
        ends.unwrap_or_else(|wrong| panic!("{}, {}: {wrong}", case.name, refused_alone.concat()));
        if refused_alone.is_empty() {
            return undos;
        }
        let fails = matches!(alone, Attempt::Failed(_));
        // What goes on all the same may be what is tried again at once.
        for second in 0..if fails { MOST } else { TRIED_AGAIN } {
            let (mut world, attempt, refused) = attempt(case, &[first, second]);
            if refused.len() < 2 {
                world.ends_empty().unwrap();
                break;
            }
            undos += 1;
            let said = format!("{}, {}", case.name, refused.join(", then "));
            let by_restart = undos % 2 == 0;
            // A command that is asked to end may be faster than the next call. A server that makes a state again does so beside its VMM.
            let is_same = refused.first() == refused_alone.first();
            let is_same = is_same && refused_alone.first().is_some_and(|call| !call.contains(RESTORE));
            let told = match fails && is_same {
                true => tells_the_first(&attempt),
                false => Ok(()),
            };
            if by_restart {
                world.restart();
            }
            told.and_then(|()| check(case, Fault::Refused, true, &attempt, &mut world))
                .unwrap_or_else(|wrong| panic!("{said}: {wrong}\n{attempt:?}"));
        }
    }
    panic!("{}: more than {MOST} places", case.name);
}

/// The error begins with what was refused first.
fn tells_the_first(attempt: &Attempt) -> Result<(), String> {
    let Attempt::Failed(error) = attempt else {
        return Err("it did not fail".to_owned());
    };
    let said = with_causes(error);
    // The words of the second begin with those of the first.
    match said.find(INJECTED) == said.find(INJECTED_AGAIN) {
        true => Err("the first error is not told first".to_owned()),
        false => Ok(()),
    }
}

#[test]
fn where_the_undo_fails_too_the_first_error_is_told_and_nothing_is_left() {
    each("places of an undo", every_undo);
}
