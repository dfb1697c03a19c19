//! Memory that was zeroed ahead: made while no sandbox is being started, and given to those that get devices, whose memory would be zeroed
//! before it is mapped for them. It is a gain and no more: a sandbox that gets none has its memory zeroed as ever.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use vmm_api::devices::ZEROED_PIECE;
use vmm_api::{Functions, VmmClient};
use wire::packet::MAX_FDS;

use crate::node::Node;
use crate::resources::zeroed_memory::{Attempt, Piece};
use crate::store::database::Stored;
use crate::vmm::vm::Vm;
use crate::{Error, thread};

/// Between two looks whether there is time and memory for a piece. What is given back meanwhile is seen at once.
const LOOK: Duration = Duration::from_secs(1);

/// Between two attempts that failed.
const RETRY: Duration = Duration::from_secs(60);

impl Node {
    /// Has memory zeroed from here on, in a thread that waits while all of it is ready. It ends with the daemon, and who fills a piece with it.
    pub(crate) fn start_zeroing_memory(self: &Arc<Self>) -> Result<(), Error> {
        if self.zeroed.size().bytes() == 0 {
            return Ok(());
        }
        let node = Arc::clone(self);
        thread::spawn("zeroed memory", move || {
            while node.zeroed.wait_until_one_is_missing() {
                match node.zeroed.make_one(node.cgroups.as_ref()) {
                    Attempt::Made | Attempt::Full => (),
                    Attempt::Busy => node.budget.wait_for_change(LOOK),
                    Attempt::Failed => std::thread::sleep(RETRY),
                }
            }
        })
    }

    /// Gives a VMM that is about to get its first function as much as its guest is going to plug, if it takes any: nothing of its hot-pluggable
    /// memory is plugged or asked for, and so it is in nobody's use: what comes for one whose guest uses it already would have no place.
    /// Whatever comes of that, it is not given to another.
    pub(super) fn give_zeroed_memory(&self, stored: &Stored, vm: &Vm, told: &Functions) -> Result<(), Error> {
        let is_for = told.functions.is_empty() && told.zeroed_memory == Some(0);
        if !is_for || self.zeroed.is_empty() {
            return Ok(());
        }
        let info = vm.ask("it was asked how much memory its guest has", VmmClient::info)?;
        let is_untouched = info
            .hotplug_memory
            .is_some_and(|memory| memory.plugged == 0 && memory.target == 0);
        if !is_untouched {
            return Ok(());
        }
        let wanted = stored
            .sandbox
            .config
            .resources
            .plugged()
            .bytes()
            .div_ceil(ZEROED_PIECE.bytes());
        let pieces = self.zeroed.take(usize::try_from(wanted).unwrap_or(usize::MAX));
        for some in pieces.chunks(MAX_FDS) {
            if let Err(error) = give(vm, some) {
                log::warn!(
                    "sandbox {} gets no memory that was zeroed ahead, and has its own zeroed: {error}",
                    stored.sandbox.id
                );
                break;
            }
        }
        Ok(())
    }
}

fn give(vm: &Vm, pieces: &[Piece]) -> Result<(), Error> {
    let files: Vec<_> = pieces.iter().map(|piece| piece.file.as_fd()).collect();
    vm.ask("it was given zeroed memory", |client| client.add_zeroed_memory(&files))
}
