//! Modules, their kernels and their variables.
//!
//! ```text
//!   told of ── variables have addresses ── pieces of the fat binary ──▶ whole ── the first question ──▶ read, or refused for good
//! ```
//!
//! Nothing is read before it is asked for: programs have hundreds of modules and use few.

use std::collections::HashMap;
use std::ffi::CStr;
use std::sync::atomic::AtomicBool;

use accel_cuda_null::{Failure, Quota};
use accel_proto::cuda::{BasaltModuleData, BasaltModuleGetFunction, BasaltModuleVariable, CudaLaunchKernel};
use accel_ptx::fatbin::{self, MAX_CONTAINER};
use accel_ptx::{Kernel, Launch, Module as Loaded, OutOfRange, Program};
use serde::{Deserialize, Serialize};

use crate::memory::{END, Memory};
use crate::{Client, Error};

/// What a kernel may take: minutes where whole warps take part. Whoever wants more is told that it took too long, as a watchdog tells.
const BUDGET: u64 = 1 << 36;
/// Addresses of variables that no program has registered: no process has memory there.
const OWN: u64 = 1 << 56;
/// What such addresses are multiples of.
const OWN_ALIGN: u64 = 256;
/// Kernels that are tried before one of several programs is taken.
const MOST_TRIED: usize = 256;
/// Variables that a program may register, for all of its modules.
const MOST_VARIABLES: usize = 1 << 16;
/// Kernels that a program may ask for: three times what PyTorch has.
const MOST_KERNELS: usize = 1 << 16;
/// Bytes of a kernel's or a variable's name, which are kept.
const LONGEST_NAME: usize = 4096;

/// What a module's fat binary has.
#[derive(Debug)]
enum Code {
    /// Nobody has looked.
    Unread,
    Loaded(Box<Loaded>),
    Refused(Error),
}

/// A module.
#[derive(Debug)]
struct Module {
    /// Its fat binary, as far as it has come, and how long it is to be.
    bytes: Vec<u8>,
    total: u64,
    code: Code,
    /// From where on its variables had addresses, if it is loaded.
    from: u64,
    /// Addresses and sizes by the names that the program has told.
    variables: HashMap<String, (u64, u64)>,
}

/// A client's modules and kernels, by their names.
#[derive(Debug)]
pub(crate) struct Modules {
    modules: HashMap<u32, Module>,
    kernels: HashMap<u32, (u32, String)>,
    /// Variables that programs have told of, of all modules.
    told: usize,
    /// The address of the next variable that nobody has registered.
    next: u64,
}

fn text(name: &CStr) -> String {
    name.to_string_lossy().into_owned()
}

impl Modules {
    pub(crate) fn new() -> Self {
        Self {
            modules: HashMap::new(),
            kernels: HashMap::new(),
            told: 0,
            next: OWN,
        }
    }

    /// There is a new one.
    pub(crate) fn add(&mut self, name: u32) {
        let module = Module {
            bytes: Vec::new(),
            total: 0,
            code: Code::Unread,
            from: 0,
            variables: HashMap::new(),
        };
        self.modules.insert(name, module);
    }

    /// One is gone, with its kernels. What its variables have of memory is given back as other memory is.
    pub(crate) fn remove(&mut self, name: u32, memory: &mut Memory, client: &mut dyn Client) {
        let Some(module) = self.modules.remove(&name) else {
            return;
        };
        self.kernels.retain(|_, (of, _)| *of != name);
        self.told -= module.variables.len();
        memory.give_back(module.total, client);
    }

    fn find(&mut self, name: u32) -> Result<&mut Module, Error> {
        self.modules
            .get_mut(&name)
            .ok_or(Error::Failure(Failure::InvalidHandle))
    }

    /// A variable of a module that has not been read: memory where the client says.
    pub(crate) fn add_variable(
        &mut self,
        call: &BasaltModuleVariable<'_>,
        memory: &mut Memory,
        client: &mut dyn Client,
    ) -> Result<(), Error> {
        let told = self.told;
        let module = self.find(call.module.raw())?;
        let name = text(call.name);
        if !matches!(module.code, Code::Unread) || module.variables.contains_key(&name) {
            return Err(Error::Invalid(
                "a variable that its module has already, or that comes too late",
            ));
        }
        if told >= MOST_VARIABLES || name.len() > LONGEST_NAME {
            return Err(Error::Failure(Failure::OutOfMemory));
        }
        memory.add(call.address, call.size, client)?;
        module.variables.insert(name, (call.address, call.size));
        self.told += 1;
        Ok(())
    }

    /// A piece of a module's fat binary, which takes of the client's memory as an allocation does.
    pub(crate) fn add_data(
        &mut self,
        call: &BasaltModuleData,
        memory: &mut Memory,
        client: &mut dyn Client,
    ) -> Result<(), Error> {
        let Module {
            bytes,
            total,
            code: Code::Unread,
            ..
        } = self.find(call.module.raw())?
        else {
            return Err(Error::Invalid("code of a module that has been read"));
        };
        let order = Error::Invalid("a piece of a module's code that is not the next one, or is longer than all");
        let end = call.offset.checked_add(call.count).filter(|end| *end <= call.total);
        let is_next = call.offset == bytes.len() as u64 && (call.offset == 0 || call.total == *total);
        if end.is_none() || !is_next || call.count != call.bytes.length || call.total > MAX_CONTAINER {
            return Err(order);
        }
        if call.offset == 0 {
            if *total != 0 {
                return Err(order);
            }
            memory.charge(call.total, client)?;
            *total = call.total;
            bytes.try_reserve_exact(usize::try_from(call.total).map_err(|_| Failure::OutOfMemory)?)?;
        }
        let begin = bytes.len();
        bytes.resize(
            begin + usize::try_from(call.count).map_err(|_| Failure::OutOfMemory)?,
            0,
        );
        match client.read(call.bytes.offset, &mut bytes[begin..]) {
            true => Ok(()),
            false => Err(Error::Invalid("a piece of a module's code outside of the arena")),
        }
    }

    /// A module that has been read, which is done when it is asked for first.
    fn loaded(&mut self, name: u32, memory: &mut Memory, client: &mut dyn Client) -> Result<&Loaded, Error> {
        let next = &mut self.next;
        let module = self
            .modules
            .get_mut(&name)
            .ok_or(Error::Failure(Failure::InvalidHandle))?;
        if let (Code::Unread, bytes) = (&module.code, &module.bytes) {
            if bytes.len() as u64 != module.total || bytes.is_empty() {
                return Err(Error::NoCode(bytes.len() as u64, module.total));
            }
            module.from = *next;
            let loaded = read(bytes).and_then(|program| load(program, &module.variables, (memory, next), client));
            module.code = match loaded {
                Ok(loaded) => Code::Loaded(Box::new(loaded)),
                Err(error) => Code::Refused(error),
            };
        }
        match &module.code {
            Code::Loaded(loaded) => Ok(loaded),
            Code::Refused(error) => Err(error.clone()),
            Code::Unread => Err(Error::NoCode(0, 0)),
        }
    }

    /// A kernel under a new name: what its parameters are.
    pub(crate) fn get_function(
        &mut self,
        call: &BasaltModuleGetFunction<'_>,
        memory: &mut Memory,
        client: &mut dyn Client,
    ) -> Result<&Kernel, Error> {
        let (module, name) = (call.module.raw(), text(call.name));
        if self.kernels.len() >= MOST_KERNELS || name.len() > LONGEST_NAME {
            return Err(Error::Failure(Failure::OutOfMemory));
        }
        self.loaded(module, memory, client)?.program().kernel(&name)?;
        self.kernels.insert(call.kernel.raw(), (module, name));
        Ok(self.kernel(call.kernel.raw())?.1)
    }

    /// Where a variable is that the program has told, and how long it is; which PTX has, of that length.
    pub(crate) fn get_variable(
        &mut self,
        (module, name): (u32, &CStr),
        memory: &mut Memory,
        client: &mut dyn Client,
    ) -> Result<(u64, u64), Error> {
        let name = text(name);
        let found = self.loaded(module, memory, client)?.variable(&name);
        let told = self.find(module)?.variables.get(&name).copied();
        match told.filter(|told| found == Some(*told)) {
            Some(told) => Ok(told),
            None => Err(Error::NoVariable(name)),
        }
    }

    /// A kernel and its module.
    pub(crate) fn kernel(&self, name: u32) -> Result<(&Loaded, &Kernel), Error> {
        let missing = Error::Failure(Failure::InvalidHandle);
        let (module, kernel) = self.kernels.get(&name).ok_or(missing.clone())?;
        let Some(Module {
            code: Code::Loaded(loaded),
            ..
        }) = self.modules.get(module)
        else {
            return Err(missing);
        };
        Ok((loaded, loaded.program().kernel(kernel)?))
    }

    /// `cudaLaunchKernel`.
    pub(crate) fn launch(
        &self,
        call: &CudaLaunchKernel<'_>,
        memory: &mut Memory,
        stop: &AtomicBool,
    ) -> Result<(), Error> {
        let (module, kernel) = self.kernel(call.kernel.raw())?;
        let dims = |bytes: &[u8]| {
            let (dims, rest) = bytes.as_chunks::<4>();
            let dims = <[[u8; 4]; 3]>::try_from(dims).ok().filter(|_| rest.is_empty());
            dims.map(|dims| dims.map(u32::from_le_bytes))
                .ok_or(Error::Invalid("a grid or a block of other than three sizes"))
        };
        let launch = Launch {
            grid: dims(call.grid_dim.bytes())?,
            block: dims(call.block_dim.bytes())?,
            // What is more than 32 bits is more than there is, and refused as that.
            dynamic_shared: u32::try_from(call.shared_mem).unwrap_or(u32::MAX),
            parameters: call.args.bytes(),
            budget: BUDGET,
        };
        module.launch_until(&kernel.name, &launch, stop, memory)?;
        Ok(())
    }
}

/// A module as it is saved, its code at a place of the file's.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedModule<P> {
    name: u32,
    code: P,
    total: u64,
    /// If it is loaded.
    from: Option<u64>,
    variables: Vec<(String, u64, u64)>,
}

/// All modules and kernels as they are saved.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedModules<P> {
    modules: Vec<SavedModule<P>>,
    kernels: Vec<(u32, u32, String)>,
    next: u64,
}

/// Whose memory goes again at once.
struct Nobody;

impl Quota for Nobody {
    fn charge(&mut self, _: u64) -> bool {
        true
    }

    fn give_back(&mut self, _: u64) {}
}

impl Client for Nobody {
    fn read(&mut self, _: u64, _: &mut [u8]) -> bool {
        false
    }

    fn write(&mut self, _: u64, _: &[u8]) -> bool {
        false
    }
}

impl Modules {
    /// All of them; `put` takes code.
    pub(crate) fn save<P, E>(&self, put: &mut dyn FnMut(&[u8]) -> Result<P, E>) -> Result<SavedModules<P>, E> {
        let mut modules = Vec::new();
        for (name, module) in &self.modules {
            let variables = module.variables.iter();
            modules.push(SavedModule {
                name: *name,
                code: put(&module.bytes)?,
                total: module.total,
                from: matches!(module.code, Code::Loaded(_)).then_some(module.from),
                variables: variables.map(|(name, (at, size))| (name.clone(), *at, *size)).collect(),
            });
        }
        let kernels = self.kernels.iter();
        Ok(SavedModules {
            modules,
            kernels: kernels
                .map(|(name, (module, text))| (*name, *module, text.clone()))
                .collect(),
            next: self.next,
        })
    }

    /// The same again, without the memory of variables. Whoever had read a module's code finds it read.
    pub(crate) fn restore<P>(
        saved: &SavedModules<P>,
        get: &dyn Fn(&P) -> Option<Vec<u8>>,
        memory: &mut Memory,
        client: &mut dyn Client,
    ) -> Result<Self, Error> {
        let mut all = Self::new();
        let too_long = |name: &String| name.len() > LONGEST_NAME;
        let kernels = saved.kernels.iter().map(|(_, _, name)| name);
        let variables = saved.modules.iter().flat_map(|module| &module.variables);
        let told: usize = saved.modules.iter().map(|module| module.variables.len()).sum();
        let is_bad = |at: u64| !(OWN..=END).contains(&at);
        let mut places = saved.modules.iter().filter_map(|module| module.from);
        if is_bad(saved.next) || places.any(is_bad) {
            return Err(Error::Invalid("addresses of variables that there cannot be"));
        }
        all.told = told;
        if told > MOST_VARIABLES
            || saved.kernels.len() > MOST_KERNELS
            || kernels.chain(variables.map(|(name, ..)| name)).any(too_long)
        {
            return Err(Error::Invalid("more kernels, or longer names, than there can be"));
        }
        for one in &saved.modules {
            let bytes = get(&one.code).ok_or(Error::Invalid("code outside of what was saved"))?;
            if bytes.len() as u64 > one.total || one.total > MAX_CONTAINER {
                return Err(Error::Invalid("a module that is longer than it can be"));
            }
            memory.charge(one.total, client)?;
            let variables = one.variables.iter();
            let module = Module {
                bytes,
                total: one.total,
                code: Code::Unread,
                from: 0,
                variables: variables.map(|(name, at, size)| (name.clone(), (*at, *size))).collect(),
            };
            all.modules.insert(one.name, module);
            if let Some(from) = one.from {
                // What variables begin with is nobody's: the client's memory is what was saved of it.
                let (mut place, mut nobody) = (Memory::new(memory.most()), Nobody);
                for (_, address, size) in &one.variables {
                    place.add(*address, *size, &mut nobody)?;
                }
                all.next = from;
                all.loaded(one.name, &mut place, &mut nobody)?;
            }
        }
        for (name, module, text) in &saved.kernels {
            all.kernels.insert(*name, (*module, text.clone()));
        }
        all.next = saved.next;
        Ok(all)
    }
}

/// The program of a fat binary. Of several, which were made for different GPUs, the newest of which every kernel can be run; if there is
/// none, the newest that can be read.
fn read(bytes: &[u8]) -> Result<Program, Error> {
    let mut texts = fatbin::ptx(bytes)?;
    texts.sort_by_key(|ptx| std::cmp::Reverse(ptx.target));
    let (mut readable, mut refused) = (None, None);
    for ptx in texts {
        match Program::parse(&ptx.text) {
            Ok(program) => {
                // Each takes as long as the module has functions; of a module with more of both, the first ones tell.
                let mut first = program.kernels().iter().take(MOST_TRIED);
                let all = first.all(|kernel| program.kernel(&kernel.name).is_ok());
                if all {
                    return Ok(program);
                }
                readable.get_or_insert(program);
            }
            Err(error) => _ = refused.get_or_insert(error),
        }
    }
    match (readable, refused) {
        (Some(program), _) => Ok(program),
        (None, Some(refused)) => Err(refused.into()),
        (None, None) => Err(fatbin::FatbinError::NoPtx.into()),
    }
}

/// Gives variables their addresses, and what they begin with.
fn load(
    program: Program,
    told: &HashMap<String, (u64, u64)>,
    (memory, next): (&mut Memory, &mut u64),
    client: &mut dyn Client,
) -> Result<Loaded, Error> {
    let names: Vec<String> = program
        .variables()
        .iter()
        .map(|variable| variable.name.clone())
        .collect();
    let (mut names, mut failure) = (names.into_iter(), None);
    // They are asked for in the program's order.
    let place = |memory: &mut Memory, size: u64, align: u32| {
        let name = names.next().ok_or(OutOfRange)?;
        if let Some((address, told)) = told.get(&name) {
            let fits = size <= *told && address.is_multiple_of(u64::from(align.max(1)));
            return if fits { Ok(*address) } else { Err(OutOfRange) };
        }
        let address = next.next_multiple_of(u64::from(align.max(1)));
        let size = size.max(1);
        if let Err(error) = memory.add(address, size, client) {
            failure = Some(error);
            return Err(OutOfRange);
        }
        // With room between them, so that what runs over one's end is told.
        *next = (address + size).next_multiple_of(OWN_ALIGN) + OWN_ALIGN;
        Ok(address)
    };
    let loaded = Loaded::load(program, memory, place);
    loaded.map_err(|_| match failure {
        Some(failure) => failure.into(),
        None => Error::Invalid("a variable that is longer in PTX than the program says, or not aligned"),
    })
}
