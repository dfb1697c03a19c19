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
use crate::sandbox::entry::Entry;
use crate::store::database::CameZeroed;
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
    ///
    /// It stays charged to the cgroup where it was zeroed, and the sandbox's own may have that much less. A daemon that dies before this is in
    /// the record leaves a sandbox that was being started, which the next one ends.
    pub(super) fn give_zeroed_memory(&self, entry: &Entry, vm: &Vm, told: &Functions) -> Result<(), Error> {
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
        let resources = entry.stored().sandbox.config.resources;
        let wanted = resources.plugged().bytes().div_ceil(ZEROED_PIECE.bytes());
        let pieces = self.zeroed.take(usize::try_from(wanted).unwrap_or(usize::MAX));
        for some in pieces.chunks(MAX_FDS) {
            if let Err(error) = give(vm, some) {
                log::warn!(
                    "sandbox {} gets no memory that was zeroed ahead, and has its own zeroed: {error}",
                    entry.id
                );
                break;
            }
        }
        if pieces.is_empty() {
            return Ok(());
        }
        drop(pieces);
        let told = vm.ask("it was asked what it has of zeroed memory", VmmClient::functions)?;
        let bytes = told.zeroed_memory.unwrap_or(0);
        self.note_change(entry, |stored| {
            stored.came_zeroed = CameZeroed {
                bytes,
                stays: bytes > 0,
            };
        })?;
        self.limit_memory(entry)
    }

    /// A sandbox may give back what it has of such memory from here on, and take other memory for it, which is charged to its own cgroup:
    /// that may have all of its memory again. Before it is asked to, as its guest is not to be killed for what it was asked to do.
    pub(super) fn let_zeroed_memory_go(&self, entry: &Entry) -> Result<(), Error> {
        let came_zeroed = entry.stored().came_zeroed;
        if came_zeroed.bytes == 0 {
            return Ok(());
        }
        if came_zeroed.stays {
            self.note_change(entry, |stored| stored.came_zeroed.stays = false)?;
        }
        self.limit_memory(entry)
    }
}

fn give(vm: &Vm, pieces: &[Piece]) -> Result<(), Error> {
    let files: Vec<_> = pieces.iter().map(|piece| piece.file.as_fd()).collect();
    vm.ask("it was given zeroed memory", |client| client.add_zeroed_memory(&files))
}
