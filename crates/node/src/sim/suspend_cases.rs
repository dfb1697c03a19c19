//! Suspending a sandbox, and everything that can be asked of one that is suspended, for [`super::cases`].

use std::time::Duration;

use node_api::State;

use super::cases::{Case, OWN, UNNOTICED, running, running_bare};
use super::{Attempt, World};

fn suspended(world: &mut World) {
    running(world);
    world.write_to_disk("web", OWN);
    world.node().suspend(&world.entry("web")).unwrap();
}

/// One that is suspended has what was in its memory, and one that runs has nothing that it could go back to by mistake.
fn memory_is_where_it_belongs(world: &World, _: &Attempt) -> Result<(), String> {
    let Ok(entry) = world.node().find("web") else {
        return Ok(());
    };
    let is_there = world.node().suspended(&entry).state().exists();
    match (entry.state(), is_there) {
        (State::Suspended, false) => Err("what it was suspended with is lost".to_owned()),
        (State::Running, true) => Err("what it was suspended with is there still".to_owned()),
        _ => Ok(()),
    }
}

/// Something that has to do with the memory of a sandbox, which is there afterwards.
const OF_MEMORY: Case = Case {
    lasts: true,
    goes_on: false,
    also: memory_is_where_it_belongs,
    ..UNNOTICED
};

/// When it is saved it is suspended, although its VMM could not be ended in order.
const SUSPEND: Case = Case {
    name: "suspend",
    prepare: running,
    act: |world| world.node().suspend(&world.entry("web")),
    undone: &[Some(State::Running), Some(State::Suspended)],
    done: Some(State::Suspended),
    ..OF_MEMORY
};

pub(super) const CASES: &[Case] = &[
    SUSPEND,
    Case {
        name: "suspend of one that owns CPUs",
        prepare: running_bare,
        ..SUSPEND
    },
    Case {
        name: "resume of one that is suspended",
        prepare: suspended,
        act: |world| world.node().resume(&world.entry("web")),
        // Behind the moment from which there is no way back it goes on with what it has.
        undone: &[Some(State::Suspended), Some(State::Running)],
        done: Some(State::Running),
        ..OF_MEMORY
    },
    Case {
        name: "stop of one that is suspended",
        prepare: suspended,
        act: |world| world.node().stop(&world.entry("web"), Duration::ZERO),
        undone: &[Some(State::Suspended), Some(State::Exited)],
        done: Some(State::Exited),
        ..OF_MEMORY
    },
    Case {
        name: "remove of one that is suspended",
        prepare: suspended,
        act: |world| world.node().remove(&world.entry("web"), true),
        undone: &[Some(State::Suspended), None],
        done: None,
        lasts: false,
        ..OF_MEMORY
    },
];
