//! Kernels and variables of the program: which fat binaries, functions and variables were registered, and which of them the server knows.
//!
//! ```text
//!   registered: two addresses and a string's, noted ──first launch──▶ the module and the kernel are told ──▶ launches by the name
//!                                                    └─ where the server takes code: variables and bytes, too, and the kernel's parameters
//!                                                       come back, by which the arguments of launches are copied
//! ```
//!
//! PyTorch registers 445 fat binaries and 21 504 functions when it is imported, and launches a few hundred; nothing is looked at before the
//! first launch.
#![allow(unsafe_code, reason = "a kernel's name is a string of the program's")]

use std::collections::{BTreeSet, HashMap};
use std::ffi::CStr;
use std::sync::{Arc, Mutex};

use accel_proto::Handle;
use accel_proto::cuda::{
    BasaltModuleData, BasaltModuleGetFunction, BasaltModuleGetVariable, BasaltModuleLoad, BasaltModuleUnload,
    BasaltModuleVariable, CudaMalloc,
};

use crate::connection::{Connection, connection};
use crate::fatbin;
use crate::generated::values::{
    cudaErrorInvalidDeviceFunction, cudaErrorInvalidSymbol, cudaErrorInvalidValue, cudaErrorMemoryAllocation,
    cudaErrorNotSupported,
};
pub(crate) use crate::layout::Layout;
use crate::lock;
use crate::memory;
use crate::reserved;
use crate::stub::{self, Failure};

/// Names of kernels begin here; those of all other objects are below it and count up from 1 024, so that a process that makes a thousand a
/// second meets this in twelve days.
const FIRST: u32 = 1 << 30;
/// So many places and sizes are asked for: with their counts they fit into a message.
const MOST_PARAMETERS: u32 = 4096;
/// A fat binary goes to the server in pieces of so many bytes, of which several are in the smallest arena.
const PIECE: usize = 256 << 10;

#[derive(Debug, Default)]
struct Module {
    /// The wrapper's address.
    wrapper: usize,
    /// A container without one, copied: the program may drop its own.
    copy: Option<Arc<[u8]>>,
    /// Its name at the server, if that knows it.
    name: Option<u32>,
    is_gone: bool,
    /// It has memory that both sides are to have, which is not served.
    has_managed: bool,
    /// Indices of its variables.
    variables: Vec<usize>,
    /// Where the server has said that variables of it are.
    places: BTreeSet<u64>,
}

#[derive(Debug)]
struct Function {
    module: usize,
    host: usize,
    name: usize,
    is_told: bool,
    /// Where the server takes code.
    layout: Option<Arc<Layout>>,
}

#[derive(Debug, Clone, Copy)]
struct Variable {
    module: usize,
    host: usize,
    name: usize,
    size: u64,
    /// Where it is on the device, once the server has been told.
    address: Option<u64>,
    is_known: bool,
}

#[derive(Debug, Default)]
struct Registry {
    modules: Vec<Module>,
    functions: Vec<Function>,
    /// Functions by their addresses in the program: those that were noted when one was looked up last.
    by_host: HashMap<usize, usize>,
    noted: usize,
    variables: Vec<Variable>,
}

static REGISTRY: Mutex<Option<Registry>> = Mutex::new(None);

/// A fat binary; what the program names it by.
pub(crate) fn add_module(wrapper: usize) -> usize {
    let mut registry = lock(&REGISTRY);
    let registry = registry.get_or_insert_default();
    registry.modules.push(Module {
        wrapper,
        ..Module::default()
    });
    registry.modules.len()
}

/// A fat binary without a wrapper, which is copied.
///
/// # Safety
///
/// What is mapped at the address stays as it is until this returns.
pub(crate) unsafe fn add_container(code: usize) -> Result<usize, Failure> {
    // SAFETY: 1. the caller's.
    let copy = unsafe { fatbin::bare(code) }?.into();
    let mut registry = lock(&REGISTRY);
    let registry = registry.get_or_insert_default();
    registry.modules.push(Module {
        copy: Some(copy),
        ..Module::default()
    });
    Ok(registry.modules.len())
}

/// A fat binary is gone, and its kernels.
pub(crate) fn remove_module(module: usize) {
    let mut registry = lock(&REGISTRY);
    if let Some(found) = registry.get_or_insert_default().module_mut(module) {
        found.is_gone = true;
        found.copy = None;
    }
}

/// The program has unloaded a library; a server that says addresses unloads it, too.
pub(crate) fn unload(module: usize) -> Result<(), Failure> {
    let told = lock(&REGISTRY)
        .get_or_insert_default()
        .module_mut(module)
        .and_then(|found| found.name);
    remove_module(module);
    let Some(name) = told else { return Ok(()) };
    let connection = connection()?;
    if !connection.device.says_addresses {
        return Ok(());
    }
    // Before the server hears of it: then it may put something else there.
    lock(&REGISTRY).get_or_insert_default().forget_places(module);
    connection.send(&BasaltModuleUnload {
        module: Handle::from_raw(name),
    })
}

/// A function of a fat binary, by the address that stands for it in the program.
pub(crate) fn add_function(module: usize, host: usize, name: usize) {
    let function = Function {
        module,
        host,
        name,
        is_told: false,
        layout: None,
    };
    lock(&REGISTRY).get_or_insert_default().functions.push(function);
}

/// A variable of a fat binary, by the address that stands for it in the program.
pub(crate) fn add_variable(module: usize, host: usize, name: usize, size: u64) {
    let mut registry = lock(&REGISTRY);
    let registry = registry.get_or_insert_default();
    let index = registry.variables.len();
    if let Some(found) = registry.module_mut(module) {
        found.variables.push(index);
        registry.variables.push(Variable {
            module,
            host,
            name,
            size,
            address: None,
            is_known: false,
        });
    }
}

/// A fat binary has a variable in memory that both sides are to have.
pub(crate) fn add_managed(module: usize) {
    let mut registry = lock(&REGISTRY);
    if let Some(found) = registry.get_or_insert_default().module_mut(module) {
        found.has_managed = true;
    }
}

/// The kernel's name that an address stands for, which is the name already or a function of the program's.
pub(crate) fn name(host: usize) -> Option<u32> {
    let mut registry = lock(&REGISTRY);
    let registry = registry.get_or_insert_default();
    if let Ok(name) = u32::try_from(host)
        && registry.index(name).is_some()
    {
        return Some(name);
    }
    let from = registry.noted;
    let fresh = registry.functions.iter().enumerate().skip(from);
    registry
        .by_host
        .extend(fresh.map(|(index, function)| (function.host, index)));
    registry.noted = registry.functions.len();
    let index = *registry.by_host.get(&host)?;
    let module = registry.functions.get(index)?.module;
    let is_gone = registry.module_mut(module)?.is_gone;
    (!is_gone)
        .then(|| u32::try_from(index).ok()?.checked_add(FIRST))
        .flatten()
}

/// A kernel of a module by its name, which is the same one each time.
pub(crate) fn kernel_of(module: usize, name: &CStr) -> Result<u32, Failure> {
    let mut registry = lock(&REGISTRY);
    let registry = registry.get_or_insert_default();
    let unknown = Failure::Code(cudaErrorInvalidValue);
    if registry.module_mut(module).is_none_or(|module| module.is_gone) {
        return Err(unknown);
    }
    let mut known = registry.functions.iter();
    let index = match known.position(|function| function.module == module && text(function.name) == name) {
        Some(index) => index,
        None => {
            // As long as the process: a function's name is.
            let name = name.to_owned().into_raw().expose_provenance();
            registry.functions.push(Function {
                module,
                host: name,
                name,
                is_told: false,
                layout: None,
            });
            registry.functions.len() - 1
        }
    };
    u32::try_from(index)
        .ok()
        .and_then(|index| FIRST.checked_add(index))
        .ok_or(unknown)
}

/// Where a variable of a module is that has not registered it, and its size; only a server that says addresses knows.
pub(crate) fn global(module: usize, name: &CStr) -> Result<(u64, u64), Failure> {
    let connection = connection()?;
    if !connection.device.says_addresses {
        return Err(Failure::Code(cudaErrorNotSupported));
    }
    let mut registry = lock(&REGISTRY);
    let registry = registry.get_or_insert_default();
    let told = registry.tell_module(connection, module)?;
    let (address, size) = ask_variable(connection, told.ok_or(Failure::Code(cudaErrorInvalidValue))?, name)?;
    registry.note_place(module, address);
    Ok((address, size))
}

/// Where a variable of a module is that the server knows, and its size. What the server has put somewhere, nothing of this process may have.
fn ask_variable(connection: &Connection, module: u32, name: &CStr) -> Result<(u64, u64), Failure> {
    let call = BasaltModuleGetVariable {
        module: Handle::from_raw(module),
        name,
    };
    let (address, size) = connection.ask(&call, |reply| (reply.address, reply.size))?;
    if connection.device.says_addresses {
        if !reserved::reserve(address, size) {
            return Err(Failure::Code(cudaErrorMemoryAllocation));
        }
        memory::insert(address, size, memory::Kind::Variable);
    }
    Ok((address, size))
}

/// Tells the server of a kernel, if it does not know it; where the server takes code, where the kernel's parameters are.
pub(crate) fn tell(kernel: u32) -> Result<Option<Arc<Layout>>, Failure> {
    let mut registry = lock(&REGISTRY);
    let registry = registry.get_or_insert_default();
    let unknown = Failure::Code(cudaErrorInvalidDeviceFunction);
    let index = registry.index(kernel).ok_or(unknown)?;
    let (module, name) = match registry.functions.get(index).ok_or(unknown)? {
        function if function.is_told => return Ok(function.layout.clone()),
        function => (function.module, function.name),
    };
    let connection = connection()?;
    let module = registry.tell_module(connection, module)?.ok_or(unknown)?;
    let takes_code = connection.device.takes_code;
    let call = BasaltModuleGetFunction {
        kernel: Handle::from_raw(kernel),
        module: Handle::from_raw(module),
        name: text(name),
        most: if takes_code { MOST_PARAMETERS } else { 0 },
        reply: stub::reply_place(),
    };
    let layout = if takes_code {
        let told = connection.ask(&call, |reply| {
            let places = reply.offsets.iter().zip(reply.sizes.iter());
            (reply.size, reply.count, places.collect::<Vec<_>>())
        });
        let told = told.inspect_err(|failure| not_usable("kernel", name, *failure))?;
        Some(Arc::new(Layout::new(told)?))
    } else {
        connection.send(&call)?;
        None
    };
    let function = registry.functions.get_mut(index).ok_or(unknown)?;
    function.is_told = true;
    function.layout.clone_from(&layout);
    Ok(layout)
}

/// Where a variable is on the device, and its size.
pub(crate) fn variable(host: usize) -> Result<(u64, u64), Failure> {
    let mut registry = lock(&REGISTRY);
    let registry = registry.get_or_insert_default();
    let unknown = Failure::Code(cudaErrorInvalidSymbol);
    // The last one, as with functions; few programs have more than a few.
    let found = registry.variables.iter().rposition(|variable| variable.host == host);
    let index = found.ok_or(unknown)?;
    let of = registry.variables.get(index).copied().ok_or(unknown)?;
    if let (true, Some(address)) = (of.is_known, of.address) {
        return Ok((address, of.size));
    }
    let connection = connection()?;
    let address = if connection.device.takes_code {
        let module = registry.tell_module(connection, of.module)?.ok_or(unknown)?;
        let told = ask_variable(connection, module, text(of.name));
        let (address, size) = told.inspect_err(|failure| not_usable("variable", of.name, *failure))?;
        if connection.device.says_addresses {
            registry.note_place(of.module, address);
        }
        if size != of.size {
            return Err(unknown);
        }
        address
    } else {
        if registry.module_mut(of.module).is_none_or(|module| module.is_gone) {
            return Err(unknown);
        }
        let address = memory::allocate_variable(of.size, connection.device.memory)?;
        let told = connection.send(&CudaMalloc {
            dev_ptr: address,
            size: of.size,
        });
        told.inspect_err(|_| memory::forget_variable(address))?;
        address
    };
    if let Some(variable) = registry.variables.get_mut(index) {
        variable.address = Some(address);
        variable.is_known = true;
    }
    Ok((address, of.size))
}

/// Says which kernel or variable the server refuses; a program does not always ask why a launch has failed.
fn not_usable(what: &str, name: usize, failure: Failure) {
    if let Failure::Code(code) = failure {
        let reason = crate::cudart::words(code).1.to_string_lossy();
        stub::say(&format!(
            "the {what} {} cannot be used: {reason}",
            text(name).to_string_lossy()
        ));
    }
}

/// A name that the program has registered.
fn text<'a>(name: usize) -> &'a CStr {
    if name == 0 {
        return c"";
    }
    // SAFETY: 1. the program has registered it as a string that ends with a zero, and it is the program's for as long as its module.
    unsafe { CStr::from_ptr(std::ptr::with_exposed_provenance(name)) }
}

impl Registry {
    fn index(&self, name: u32) -> Option<usize> {
        let index = usize::try_from(name.checked_sub(FIRST)?).ok()?;
        (index < self.functions.len()).then_some(index)
    }

    fn module_mut(&mut self, module: usize) -> Option<&mut Module> {
        self.modules.get_mut(module.checked_sub(1)?)
    }

    /// The server has said that a variable of a module is there.
    fn note_place(&mut self, module: usize, address: u64) {
        if let Some(found) = self.module_mut(module) {
            found.places.insert(address);
        }
    }

    /// A module's variables are no more where the server has said that they are. The addresses stay reserved, as those of allocations do.
    fn forget_places(&mut self, module: usize) {
        let Some(found) = self.module_mut(module) else {
            return;
        };
        let places = std::mem::take(&mut found.places);
        places.into_iter().for_each(memory::forget_variable);
        for variable in self.variables.iter_mut().filter(|variable| variable.module == module) {
            (variable.is_known, variable.address) = (false, None);
        }
    }

    /// Tells the server of a module, if it does not know it; its name there. Nothing if the program has none of that number.
    fn tell_module(&mut self, connection: &Connection, module: usize) -> Result<Option<u32>, Failure> {
        let Some(found) = self.module_mut(module).filter(|module| !module.is_gone) else {
            return Ok(None);
        };
        if let Some(name) = found.name {
            return Ok(Some(name));
        }
        let name = stub::name();
        let load = BasaltModuleLoad {
            module: Handle::from_raw(name),
            index: module.saturating_sub(1) as u64,
        };
        if connection.device.takes_code {
            if found.has_managed {
                stub::say("a module has a __managed__ variable, which is not served; use cudaMalloc and copies");
                return Err(Failure::Code(cudaErrorNotSupported));
            }
            let copy = found.copy.clone();
            let container = match &copy {
                Some(copy) => copy,
                // SAFETY: 1. the program has registered the wrapper, which is there for as long as its module.
                None => unsafe { fatbin::container(found.wrapper) }?,
            };
            // A server that says addresses has them from its library.
            let variables = match connection.device.says_addresses {
                false => found.variables.clone(),
                true => Vec::new(),
            };
            let addresses = self.places(connection, &variables)?;
            connection.send(&load)?;
            for (index, address) in variables.into_iter().zip(addresses) {
                if let Some(variable) = self.variables.get_mut(index) {
                    variable.address = Some(address);
                    connection.send(&BasaltModuleVariable {
                        module: Handle::from_raw(name),
                        name: text(variable.name),
                        address,
                        size: variable.size,
                    })?;
                }
            }
            data(connection, name, container)?;
        } else {
            connection.send(&load)?;
        }
        if let Some(found) = self.module_mut(module) {
            found.name = Some(name);
        }
        Ok(Some(name))
    }

    /// Addresses for a module's variables: of all, or of none.
    fn places(&self, connection: &Connection, variables: &[usize]) -> Result<Vec<u64>, Failure> {
        let sizes = variables.iter().filter_map(|index| self.variables.get(*index));
        let mut places: Vec<u64> = Vec::new();
        for size in sizes.map(|variable| variable.size) {
            match memory::allocate_variable(size, connection.device.memory) {
                Ok(place) => places.push(place),
                Err(failure) => {
                    places.into_iter().for_each(memory::forget_variable);
                    return Err(failure);
                }
            }
        }
        Ok(places)
    }
}

/// A module's bytes.
fn data(connection: &Connection, module: u32, container: &[u8]) -> Result<(), Failure> {
    let total = container.len() as u64;
    let mut offset = 0;
    for piece in container.chunks(PIECE.min(connection.piece())) {
        let count = piece.len() as u64;
        connection.send_data(piece, |bytes| BasaltModuleData {
            module: Handle::from_raw(module),
            offset,
            total,
            count,
            bytes,
        })?;
        offset += count;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_found_by_their_addresses_and_by_their_names() {
        let module = add_module(0);
        add_function(module, 0x7000_1000_0000, 1);
        let name = name(0x7000_1000_0000).unwrap();
        assert!(name >= FIRST);
        assert_eq!(super::name(name as usize), Some(name));
        assert_eq!(super::name(0x7000_1000_0008), None);
        add_function(module, 0x7000_1000_0008, 1);
        assert_eq!(
            super::name(0x7000_1000_0008),
            Some(name + 1),
            "one that comes later is found, too"
        );
        remove_module(module);
        assert_eq!(super::name(0x7000_1000_0000), None);
        assert_eq!(tell(7).unwrap_err(), Failure::Code(98));
        assert_eq!(variable(0x7000_1000_0010), Err(Failure::Code(13)));
    }

    #[test]
    fn where_variables_of_a_module_were_something_else_can_be_found() {
        let module = add_module(0);
        // Where nothing else of this process' is noted.
        let at = 0x0234_5678_0000;
        memory::insert(at + 4096, 64, memory::Kind::Variable);
        let mut registry = lock(&REGISTRY);
        let registry = registry.get_or_insert_default();
        registry.note_place(module, at + 4096);
        registry.forget_places(module);
        memory::insert(at, 8192, memory::Kind::Device);
        assert_eq!(memory::find(at + 5000), Some((memory::Kind::Device, 8192 - 5000)));
    }
}
