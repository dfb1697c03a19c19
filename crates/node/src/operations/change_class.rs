//! A sandbox that goes on as another class: its machine is saved, its VMM ends, and another with the host's processors as that class
//! has them goes on from there. Its guest notices no more than a pause.
//!
//! ```text
//!  held ─► commands frozen ─► vCPUs paused ─► state, memory ─► VMM ends ─► as the other class: restored ─► renewed, thawed
//!                                                                  └ which cannot be had: as what it was ─┘
//! ```
//! What is saved has no name, and goes when the machine runs. A daemon that dies on the way leaves a sandbox that has exited.

use std::sync::Arc;

use base::points;
use node_api::{Class, CpuModel, SandboxConfig, State};
use observe::span::span;

use crate::Error;
use crate::error::words::with_causes;
use crate::guest::reidentify::Renewal;
use crate::node::{Node, to_run, wrong_state};
use crate::operations::snapshot::{STAYS, can_be_kept};
use crate::operations::start::Started;
use crate::resources::limits;
use crate::sandbox::entry::Entry;
use crate::saved::snapshots::{Begun, Place};
use crate::store::database::Stored;

impl Node {
    /// Lets a sandbox that runs go on as another class.
    pub(crate) fn move_to(&self, entry: &Arc<Entry>, class: Class) -> Result<Started, Error> {
        let _operation = entry.operate();
        let stored = entry.stored();
        let sandbox = &stored.sandbox;
        let vm = match (sandbox.state, entry.vm()) {
            (State::Running, Some(vm)) => vm,
            (state, _) => return Err(wrong_state(sandbox, to_run(state))),
        };
        if !sandbox.config.detach {
            return Err(Error::Tied(sandbox.name.clone()));
        }
        let moved = moved(&stored, class)?;
        limits::check(&moved, self.cgroups.as_ref())?;
        drop(self.open_volumes(&moved.volumes)?);
        let promise = self.admit_other(entry, &moved)?;
        let line = vm.line()?;
        let begun = Begun::new(&self.paths.snapshots())?;
        self.update(entry, |stored| stored.held = true)?;
        if let Err(error) = self.keep_machine(&vm, &stored, &begun.place) {
            // It takes room that the database may need.
            drop(begun);
            let gone_on = self.go_on_after(Some(&error), &vm, line);
            gone_on.and_then(|()| self.update(entry, |stored| stored.held = false))?;
            return Err(error);
        }
        {
            let _span = span("its VMM ends");
            self.end_for_another(entry, &vm)?;
        }
        entry.promise(promise.promise());
        self.points.at(points::MOVE_ENDED);
        let was = sandbox.config.clone();
        let Err(error) = self.go_on_as(entry, moved, &begun.place) else {
            promise.keep();
            return Ok(Started {
                sandbox: entry.stored().sandbox,
                command: None,
            });
        };
        log::warn!("sandbox {} goes on as it was: {}", entry.id, with_causes(&error));
        self.clear(entry)?;
        match self.go_on_as(entry, was, &begun.place) {
            Ok(()) => Err(Error::NotMoved {
                name: sandbox.name.clone(),
                class,
                source: Box::new(error),
            }),
            Err(lost) => {
                let cleared = self
                    .clear(entry)
                    .and_then(|()| self.exited(entry, node_api::Ended::Failed(lost.to_string())));
                Err(lost.after_undo(cleared))
            }
        }
    }

    /// By another VMM.
    fn go_on_as(&self, entry: &Arc<Entry>, config: SandboxConfig, place: &Place) -> Result<(), Error> {
        self.update(entry, |stored| stored.sandbox.config = config)?;
        let waiting = self.begin_restore(entry)?;
        // It is the same one, and the only one: nothing of it was used twice, and no hook has anything to mend.
        let (vm, _) = self.restored(entry, waiting, place, Renewal::default())?;
        self.update(entry, |stored| stored.held = false)?;
        self.runs(entry, &vm)?;
        Ok(())
    }
}

/// What a sandbox is as another class.
fn moved(stored: &Stored, class: Class) -> Result<SandboxConfig, Error> {
    let mut config = stored.sandbox.config.clone();
    let refused = |why: &str| Error::NotToBeMoved {
        name: stored.sandbox.name.clone(),
        class,
        why: why.to_owned(),
    };
    if config.resources.class == class {
        return Err(refused("it is of that class"));
    }
    if !config.resources.memory_mode.is_translated() {
        return Err(refused(STAYS));
    }
    let engines_differ = config.resources.class.is_bare() != class.is_bare();
    if engines_differ && config.resources.cpu_model != Some(CpuModel::Common) {
        return Err(refused(
            "its guest was shown what not every class has: run it with --cpu-model common, and it can be moved",
        ));
    }
    config.resources.class = class;
    config.validate()?;
    can_be_kept(stored)?;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::stored;

    #[test]
    fn what_every_class_has_can_be_moved() {
        let mut stored = stored("aaaaaaaaaaaa", "web");
        let told = |stored: &Stored, class| moved(stored, class).unwrap_err().to_string();
        assert!(told(&stored, Class::Standard).contains("it is of that class"));
        assert!(told(&stored, Class::Bare).contains("--cpu-model common"));
        let dedicated = moved(&stored, Class::Dedicated).unwrap();
        assert_eq!(dedicated.resources.class, Class::Dedicated);
        stored.sandbox.config.resources.cpu_model = Some(CpuModel::Common);
        assert_eq!(moved(&stored, Class::Bare).unwrap().resources.class, Class::Bare);
        stored.sandbox.config.resources.class = Class::Bare;
        stored.sandbox.config.resources.idle = node_api::Idle::Poll;
        assert!(told(&stored, Class::Standard).contains("--class dedicated or bare"));
        stored.sandbox.config.resources.memory_mode = node_api::MemoryMode::Identity;
        for class in [Class::Standard, Class::Dedicated] {
            assert!(told(&stored, class).contains("its memory is not translated"));
        }
    }
}
