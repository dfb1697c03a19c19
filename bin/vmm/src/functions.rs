//! Functions of the host's that come to a VM and leave it while it is there: what their requests say, done by the machine. Knows no kind
//! of function.

use std::fs::File;
use std::os::fd::OwnedFd;

use device::{DmaSpaces, FdTable};
use machine::{FunctionState, Machine};
use vmm_api::devices::MEM_SECTION;
use vmm_api::{ApiError, DeviceSpec, ErrorKind, FdRef, FunctionInfo, Reply};

use crate::devices::create_functions;
use crate::refusal::{from_machine, refuse};
use crate::request_fds::all_used;

/// What is kept for those that may come.
#[derive(Default)]
pub(crate) struct Functions {
    /// The address space that all of them share, as long as there is one; or that each has its own.
    pub(crate) spaces: DmaSpaces,
}

impl Functions {
    /// Those of a guest with an IOMMU, or without.
    pub(crate) fn of_guest(has_iommu: bool) -> Self {
        Self {
            spaces: match has_iommu {
                true => DmaSpaces::Separate { iommufd: false },
                false => DmaSpaces::Shared(None),
            },
        }
    }

    pub(crate) fn attach(
        &mut self,
        machine: &mut Machine,
        device: &DeviceSpec,
        fds: Vec<OwnedFd>,
        pagemap: Option<&File>,
    ) -> Result<(), ApiError> {
        let mut fds = FdTable::new(fds);
        let made = create_functions(std::slice::from_ref(device), &mut fds, &mut self.spaces);
        let attached = made.and_then(|functions| {
            all_used(&fds)?;
            let function = functions.into_iter().next().ok_or_else(|| {
                let message = format!(
                    "device `{}` is no function of the host's: it can only be there from the start on",
                    device.id
                );
                refuse(ErrorKind::Invalid, message)
            })?;
            if let Some(pagemap) = pagemap {
                machine.own_unwritten_holes(pagemap);
            }
            machine.attach(function).map_err(|error| from_machine(&error))
        });
        if attached.is_err() {
            // Its group may have come.
            self.spaces.close_groups();
        }
        self.follow(machine);
        attached
    }

    /// The last function takes its address space along.
    pub(crate) fn follow(&mut self, machine: &Machine) {
        if machine.first_function().is_none() {
            self.spaces.clear();
        }
    }
}

/// Gives a machine memory that came zeroed: files of that, in the place of what can be plugged and nobody uses.
pub(crate) fn add_zeroed(machine: &Machine, files: &[FdRef], fds: Vec<OwnedFd>) -> Result<Reply, ApiError> {
    let mut fds = FdTable::new(fds);
    let take = |fd: &FdRef| fds.take(*fd).map(File::from);
    let files: Result<Vec<_>, _> = files.iter().map(take).collect();
    let files = files.map_err(|error| refuse(ErrorKind::Invalid, error))?;
    all_used(&fds)?;
    let added = machine.add_zeroed_memory(files);
    added.map(|()| Reply::Done).map_err(|error| from_machine(&error))
}

/// What a driver is told of a machine's functions, which came by files of their own or by groups.
pub(crate) fn told(machine: &mut Machine, iommufd: bool) -> vmm_api::Functions {
    let (states, mapped) = machine.functions();
    let growth = machine.growth().unwrap_or_default();
    let deflation = machine.deflation().unwrap_or_default();
    let mapping = machine.map_counts();
    let info = |(id, state)| FunctionInfo {
        id,
        state: match state {
            FunctionState::Mapping => vmm_api::FunctionState::Mapping,
            FunctionState::Present(slot) => vmm_api::FunctionState::Present {
                slot: u8::try_from(slot).unwrap_or(u8::MAX),
            },
            FunctionState::Leaving => vmm_api::FunctionState::Leaving,
            FunctionState::Failed(why) => vmm_api::FunctionState::Failed(why),
        },
    };
    vmm_api::Functions {
        mapped,
        total: match machine.is_pinned() {
            // The guest maps what it wants to: nobody waits for more.
            true if machine.has_iommu() => mapped,
            true => machine.memory().bytes() + growth.wanted.next_multiple_of(MEM_SECTION.bytes()),
            false => 0,
        },
        map_calls: mapping.calls,
        map_bytes: mapping.bytes,
        map_usec: u64::try_from(mapping.time.as_micros()).unwrap_or(u64::MAX),
        plug_hits: growth.counts.hits + deflation.counts.hits,
        plug_misses: growth.counts.misses + deflation.counts.misses,
        error: growth.error.or(deflation.error),
        iommufd: Some(iommufd),
        memory_fill: true,
        zeroed_memory: machine.zeroed_memory().ok(),
        busy: machine.maps_memory(),
        functions: states.into_iter().map(info).collect(),
    }
}
