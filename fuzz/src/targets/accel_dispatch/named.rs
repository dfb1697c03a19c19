//! Random arguments of calls that mostly make sense: names of what there is, addresses of what was allocated, small numbers.
//!
//! A source for the same generated code that reads records. Knows which calls make something by how they are called.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::sync::LazyLock;

use accel_proto::opencl::Mem;
use accel_proto::opencl::table::COMMANDS;
use accel_proto::samples::Samples;
use accel_proto::{
    AnyHandle, Handle, List, Memory, Pieces, Plain, Reader, Refused, Sort, Source, Span, SvmAddress, Value,
};

use super::{EDGES, LIMITS};

/// `CL_CONTEXT_PLATFORM` and `CL_QUEUE_PROPERTIES`, the keys of properties that do something.
const KEYS: [u64; 2] = [0x1084, 0x1093];
/// Numbers of calls that make something.
pub(super) static MAKERS: LazyLock<BTreeSet<u16>> = LazyLock::new(|| {
    let makes = |name: &str| name.starts_with("clCreate") || name == "clSVMAlloc";
    let makers = COMMANDS.iter().filter(|command| makes(command.name));
    makers.filter_map(|command| command.op).collect()
});

/// Names of objects, by their sort.
#[derive(Debug, Default)]
pub(super) struct Names {
    given: [u32; Sort::ALL.len()],
    /// Of what was made last, the newest at the end; some of it is released by now.
    there: [Vec<u32>; Sort::ALL.len()],
    /// Of what the current call makes, if it succeeds.
    pub(super) made: Vec<(Sort, u32)>,
    /// Where shared virtual memory was allocated last.
    shared: Vec<u64>,
}

impl Names {
    /// So many are remembered of each sort.
    const MOST: usize = 6;

    /// The current call has succeeded, or nobody knows.
    pub(super) fn keep(&mut self) {
        for (sort, name) in self.made.drain(..) {
            let there = &mut self.there[sort as usize];
            if there.len() == Self::MOST {
                there.remove(0);
            }
            there.push(name);
        }
    }

    /// The server has told of shared virtual memory.
    pub(super) fn keep_address(&mut self, address: u64) {
        if self.shared.len() == Self::MOST {
            self.shared.remove(0);
        }
        self.shared.push(address);
    }
}

/// Samples whose names are those of objects that calls have made, or are about to, and whose numbers are mostly small.
pub(super) struct Named<'a, 'n> {
    pub(super) samples: Samples<'a>,
    pub(super) names: &'n mut Names,
    pub(super) random: u64,
    pub(super) is_wild: bool,
    /// Whether the call makes something, which others then use parts of.
    pub(super) makes: bool,
    /// For lists that are made here.
    pub(super) scratch: &'a mut [u8],
}

/// The platform's name, and the device's.
fn told() -> u32 {
    Handle::<Mem>::new(Handle::<Mem>::FIRST_TOLD, 1).map_or(0, Handle::raw)
}

/// The sort that a handle's type is of.
fn sort_of<T>() -> Option<Sort> {
    let name = std::any::type_name::<T>();
    let kind = name.strip_suffix('>').filter(|_| name.contains("Handle<"))?;
    let kind = kind.rsplit("::").next()?;
    Some(match kind {
        "Platform" => Sort::Platform,
        "Device" => Sort::Device,
        "Context" => Sort::Context,
        "CommandQueue" => Sort::CommandQueue,
        "Mem" => Sort::Mem,
        "Program" => Sort::Program,
        "Kernel" => Sort::Kernel,
        "Event" => Sort::Event,
        "Sampler" => Sort::Sampler,
        _ => return None,
    })
}

impl<'a> Named<'a, '_> {
    /// xorshift64 (Marsaglia 2003).
    fn next(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random >> 8
    }

    fn below(&mut self, bound: u32) -> u32 {
        let high = self.next() & u64::from(u32::MAX);
        u32::try_from(high)
            .unwrap_or_default()
            .checked_rem(bound)
            .unwrap_or_default()
    }

    /// A name of that sort: of what there is, or a new one where one is made.
    fn name(&mut self, sort: Sort, what: &str) -> u32 {
        let is_made = matches!(what, "returned" | "kernels" | "out_devices") || what == "event" && self.below(2) == 0;
        if is_made {
            let given = &mut self.names.given[sort as usize];
            *given = (*given + 1).min(4000);
            let name = Handle::<Mem>::new(*given, 1).map_or(0, Handle::raw);
            self.names.made.push((sort, name));
            return name;
        }
        if self.is_wild {
            let (index, generation) = (self.below(64), 1 + self.below(3));
            return Handle::<Mem>::new(index, generation).map_or(0, Handle::raw);
        }
        if self.below(32) == 0 {
            return 0;
        }
        if matches!(sort, Sort::Platform | Sort::Device) && self.below(8) != 0 {
            return told();
        }
        let chosen = self.next();
        let there = &self.names.there[sort as usize];
        let chosen = usize::try_from(chosen).unwrap_or_default().checked_rem(there.len());
        chosen.and_then(|chosen| there.get(chosen)).copied().unwrap_or_default()
    }

    /// A list of elements that are these bytes.
    fn keep<T: Plain>(&mut self, bytes: &[u8], what: &'static str) -> Result<List<'a, T>, Refused> {
        let scratch = std::mem::take(&mut self.scratch);
        let (place, rest) = scratch
            .split_at_mut_checked(bytes.len())
            .ok_or(Refused::Overflow { what })?;
        self.scratch = rest;
        place.copy_from_slice(bytes);
        Reader::new(place, LIMITS).list(Some((bytes.len() / T::SIZE) as u64), what)
    }

    /// An address in shared virtual memory, mostly of some.
    fn address(&mut self) -> u64 {
        let known = usize::try_from(self.next()).unwrap_or_default();
        let known = known.checked_rem(self.names.shared.len()).unwrap_or_default();
        let begin = self.names.shared.get(known).copied().unwrap_or_default();
        match self.below(8) {
            0 => 0,
            1 => EDGES[self.below(8) as usize],
            2 | 3 => begin.wrapping_add(u64::from(self.below(5000))).wrapping_sub(8),
            _ => begin,
        }
    }

    fn number(&mut self, what: &str) -> Option<u64> {
        Some(match (what, self.below(8)) {
            ("param_name", _) => u64::from(0x900 + self.below(0xc00)),
            ("size", 2..) if self.makes => u64::from(1024 + self.below(4096)),
            ("offset" | "src_offset" | "dst_offset", 2..) => 0,
            ("flags", 2..) => u64::from(self.below(8)),
            ("alignment", 2..) => 1 << self.below(8),
            (_, 0) => return None,
            (_, 1) => EDGES.get(self.below(8) as usize).copied()?,
            _ => u64::from(self.below(64)),
        })
    }
}

impl<'a> Source<'a> for Named<'a, '_> {
    fn present(&mut self, known: u32) -> Result<u32, Refused> {
        // Mostly all that there can be.
        match self.below(3) {
            0 => self.samples.present(known),
            _ => Ok(known),
        }
    }

    fn value<T: Plain>(&mut self, what: &'static str) -> Result<T, Refused> {
        if let Some(sort) = sort_of::<T>() {
            return Ok(T::get(&self.name(sort, what).to_le_bytes()));
        }
        if is_address::<T>() {
            return Ok(T::get(&self.address().to_le_bytes()));
        }
        match self.number(what) {
            Some(number) if T::SIZE <= size_of::<u64>() => Ok(T::get(&number.to_le_bytes())),
            _ => self.samples.value(what),
        }
    }

    fn count<T: Plain>(&mut self, what: &'static str) -> Result<T, Refused> {
        match what {
            // Few events are there to be waited for.
            "num_events_in_wait_list" if self.below(4) != 0 => Ok(T::get(&[0; 8])),
            _ => self.samples.count(what),
        }
    }

    fn list<T: Plain>(&mut self, length: Option<u64>, what: &'static str) -> Result<List<'a, T>, Refused> {
        let sort = sort_of::<T>();
        if sort.is_none() && !is_address::<T>() {
            return self.samples.list(length, what);
        }
        let count = length.filter(|count| *count <= 16).ok_or(Refused::Overflow { what })?;
        let Some(sort) = sort else {
            let addresses: Vec<u8> = (0..count).flat_map(|_| self.address().to_le_bytes()).collect();
            return self.keep(&addresses, what);
        };
        let names: Vec<u8> = (0..count).flat_map(|_| self.name(sort, what).to_le_bytes()).collect();
        self.keep(&names, what)
    }

    fn counted<T: Plain>(&mut self, most: Option<u64>, what: &'static str) -> Result<List<'a, T>, Refused> {
        if what != "properties" || T::SIZE != size_of::<u64>() || self.below(8) == 0 {
            return self.samples.counted(most, what);
        }
        let key = KEYS.get(self.below(2) as usize).copied().unwrap_or_default();
        let value = match key {
            0x1084 => told().into(),
            _ => self.next() & 3,
        };
        let pairs: Vec<u8> = [key, value, 0].iter().flat_map(|word| word.to_le_bytes()).collect();
        self.keep(&pairs, what)
    }

    fn text(&mut self, what: &'static str) -> Result<&'a CStr, Refused> {
        self.samples.text(what)
    }

    fn span(&mut self, length: Option<u64>, what: &'static str) -> Result<Span, Refused> {
        self.samples.span(length, what)
    }

    fn area(&mut self, what: &'static str) -> Result<Span, Refused> {
        self.samples.area(what)
    }

    fn pieces(&mut self, count: Option<u64>, what: &'static str) -> Result<Pieces<'a>, Refused> {
        self.samples.pieces(count, what)
    }

    fn choice(
        &mut self,
        length: Option<u64>,
        c_types: &[&'static str],
        what: &'static str,
    ) -> Result<Value<'a>, Refused> {
        match self.samples.choice(length, c_types, what)? {
            Value::Object(AnyHandle { c_type, .. }) => {
                let raw = Sort::of(c_type).map_or(0, |sort| self.name(sort, what));
                Ok(Value::Object(AnyHandle { c_type, raw }))
            }
            bytes => Ok(bytes),
        }
    }

    fn memory(&mut self, length: Option<u64>, what: &'static str) -> Result<Memory, Refused> {
        match self.below(2) {
            0 => Ok(Memory::Svm(SvmAddress(self.address()))),
            _ => self.samples.memory(length, what),
        }
    }
}

fn is_address<T>() -> bool {
    std::any::type_name::<T>().ends_with("::SvmAddress")
}
