//! Kernels of the program: which fat binaries and functions were registered, and which of them the server knows.
//!
//! ```text
//!   registered: two addresses and a string's, noted ──first launch──▶ the module and the kernel are told ──▶ launches by the name
//! ```
//!
//! PyTorch registers 445 fat binaries and 21 504 functions when it is imported, and launches a few hundred; nothing is looked at before the
//! first launch.
#![allow(unsafe_code, reason = "a kernel's name is a string of the program's")]

use std::collections::HashMap;
use std::ffi::CStr;
use std::sync::Mutex;

use accel_proto::Handle;
use accel_proto::cuda::{BasaltModuleGetFunction, BasaltModuleLoad};

use crate::lock;
use crate::stub::{self, Failure};

/// Names of kernels begin here; those of all other objects are below it and count up from 1 024, so that a process that makes a thousand a
/// second meets this in twelve days.
const FIRST: u32 = 1 << 30;

#[derive(Debug, Clone, Copy)]
struct Function {
    module: usize,
    host: usize,
    name: usize,
    is_told: bool,
}

#[derive(Debug, Default)]
struct Registry {
    /// For each fat binary its name at the server, if that knows it, and whether it is still registered.
    modules: Vec<(Option<u32>, bool)>,
    functions: Vec<Function>,
    /// Functions by their addresses in the program: those that were noted when one was looked up last.
    by_host: HashMap<usize, usize>,
    noted: usize,
    variables: u64,
}

static REGISTRY: Mutex<Option<Registry>> = Mutex::new(None);

/// A fat binary; what the program names it by.
pub(crate) fn add_module() -> usize {
    let mut registry = lock(&REGISTRY);
    let registry = registry.get_or_insert_default();
    registry.modules.push((None, true));
    registry.modules.len()
}

/// A fat binary is gone, and its kernels.
pub(crate) fn remove_module(module: usize) {
    let mut registry = lock(&REGISTRY);
    let registry = registry.get_or_insert_default();
    if let Some(found) = module.checked_sub(1).and_then(|index| registry.modules.get_mut(index)) {
        found.1 = false;
    }
}

/// A function of a fat binary, by the address that stands for it in the program.
pub(crate) fn add_function(module: usize, host: usize, name: usize) {
    let function = Function {
        module,
        host,
        name,
        is_told: false,
    };
    lock(&REGISTRY).get_or_insert_default().functions.push(function);
}

/// A variable. Nothing is served of it.
pub(crate) fn add_variable() {
    lock(&REGISTRY).get_or_insert_default().variables += 1;
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
    let (_, is_there) = *registry.modules.get(module.checked_sub(1)?)?;
    is_there
        .then(|| u32::try_from(index).ok()?.checked_add(FIRST))
        .flatten()
}

/// Tells the server of a kernel, if it does not know it.
pub(crate) fn tell(kernel: u32) -> Result<(), Failure> {
    let mut registry = lock(&REGISTRY);
    let registry = registry.get_or_insert_default();
    // cudaErrorInvalidDeviceFunction
    let unknown = Failure::Code(98);
    let index = registry.index(kernel).ok_or(unknown)?;
    let function = registry.functions.get_mut(index).ok_or(unknown)?;
    if function.is_told {
        return Ok(());
    }
    let place = function.module.checked_sub(1).ok_or(unknown)?;
    let module = registry.modules.get_mut(place).ok_or(unknown)?;
    let raw = match module.0 {
        Some(raw) => raw,
        None => {
            let raw = stub::name();
            stub::send(&BasaltModuleLoad {
                module: Handle::from_raw(raw),
                index: place as u64,
            })?;
            module.0 = Some(raw);
            raw
        }
    };
    let text = std::ptr::with_exposed_provenance(function.name);
    // SAFETY: 1. the program has registered it as a string that ends with a zero, and it is the program's for as long as its module.
    let name = unsafe { CStr::from_ptr(text) };
    stub::send(&BasaltModuleGetFunction {
        kernel: Handle::from_raw(kernel),
        module: Handle::from_raw(raw),
        name,
    })?;
    function.is_told = true;
    Ok(())
}

impl Registry {
    fn index(&self, name: u32) -> Option<usize> {
        let index = usize::try_from(name.checked_sub(FIRST)?).ok()?;
        (index < self.functions.len()).then_some(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_found_by_their_addresses_and_by_their_names() {
        let module = add_module();
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
        assert_eq!(tell(7), Err(Failure::Code(98)));
    }
}
