//! Modules, their kernels and variables, and launches.
//!
//! ```text
//!   told of ── bytes in pieces, in order ──▶ whole ── first kernel or variable ──▶ loaded by the library, the bytes dropped
//! ```
//!
//! A kernel's parameters are the driver's to know: a client is told where each is, and sends all of them as one block.
#![allow(unsafe_code, reason = "these are calls of functions of C")]
#![allow(non_snake_case, reason = "names are C's")]

use std::collections::BTreeMap;

use accel_proto::cuda::{self as calls, AnyReply};
use accel_proto::{Handle, List, Span};
use accel_ptx::fatbin;

use crate::Libraries;
use crate::bytes::Bytes;
use crate::failure::{Failure, check, number};
use crate::state::Context;
use crate::table::{Dim3, P};

/// Modules and kernels of a client at a time.
const MOST: usize = 1 << 17;
/// Bytes of modules that are not loaded, of all of a client's.
const MOST_BYTES: u64 = 1 << 30;
/// Parameters of a kernel, and bytes of all (CUDA C++ programming guide: 32 764 from compute capability 7.0 on).
const MOST_PARAMETERS: usize = 4096;
const MOST_ARGUMENTS: usize = 32_764;
/// `cudaErrorInvalidSymbol`, `cudaErrorInvalidKernelImage`, `cudaErrorInvalidDeviceFunction`, `cudaErrorSymbolNotFound`.
const INVALID_SYMBOL: Failure = Failure::Library(13);
const INVALID_IMAGE: Failure = Failure::Library(200);
const INVALID_FUNCTION: Failure = Failure::Library(98);
const NOT_FOUND: i32 = 500;
/// `CUDA_ERROR_INVALID_VALUE`: there is no parameter of that number.
const NO_PARAMETER: i32 = 1;

/// A module.
#[derive(Debug)]
enum Module {
    /// Bytes that have come.
    Coming(Vec<u8>),
    /// All of them.
    Whole(Vec<u8>),
    /// The library's.
    Loaded(usize),
}

/// Those of a client, and where its kernels' parameters are.
#[derive(Debug, Default)]
pub(crate) struct Modules {
    modules: BTreeMap<u32, Module>,
    /// Bytes of those that are not loaded.
    bytes: u64,
    /// With their modules.
    kernels: BTreeMap<u32, (u32, Layout)>,
}

/// Where a kernel's parameters are in its arguments: begin and length of each.
#[derive(Debug, Default)]
struct Layout {
    size: usize,
    parameters: Vec<(usize, usize)>,
}

impl Modules {
    /// All of them are unloaded.
    pub(crate) fn end(&mut self, libraries: &Libraries) {
        for module in std::mem::take(&mut self.modules).into_values() {
            if let Err(failure) = unload(libraries, &module) {
                log::warn!("a module cannot be unloaded: {failure:?}");
            }
        }
        *self = Self::default();
    }

    /// The library's module; it is loaded if it was not.
    fn load(&mut self, libraries: &Libraries, name: u32) -> Result<P, Failure> {
        let module = self.modules.get_mut(&name).ok_or(Failure::InvalidHandle)?;
        let bytes = match module {
            Module::Loaded(library) => return Ok(std::ptr::with_exposed_provenance_mut(*library)),
            Module::Coming(_) => return Err(INVALID_IMAGE),
            Module::Whole(bytes) => bytes,
        };
        // What the library reads is what its header says, and there.
        let header = bytes.get(..fatbin::HEADER).ok_or(INVALID_IMAGE)?;
        let said = fatbin::container_size(header).map_err(|_| INVALID_IMAGE)?;
        if said > bytes.len() as u64 {
            return Err(INVALID_IMAGE);
        }
        let function = libraries.runtime.cudaLibraryLoadData()?;
        let code = Bytes::from_bytes(bytes, true);
        let (mut library, no): (P, P) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: 1. the function has these types; 2. there is a place for the library; 3. the code is a container as long as it says, which
        // the runtime copies; 4. there are no options.
        check(unsafe { function((&raw mut library).cast(), code.address(), no, no, 0, no, no, 0) })?;
        self.bytes -= bytes.len() as u64;
        *module = Module::Loaded(library.expose_provenance());
        Ok(library)
    }
}

fn unload(libraries: &Libraries, module: &Module) -> Result<(), Failure> {
    let Module::Loaded(library) = module else {
        return Ok(());
    };
    let function = libraries.runtime.cudaLibraryUnload()?;
    // SAFETY: 1. the function has this type; 2. the library was loaded by the runtime, and no kernel of it has a name any more. One that
    // runs is the library's to wait for.
    check(unsafe { function(std::ptr::with_exposed_provenance_mut(*library)) })
}

pub(crate) fn basaltModuleUnload(cx: &mut Context<'_>, call: &calls::BasaltModuleUnload) -> Result<(), Failure> {
    let name = call.module.raw();
    let module = cx.state.modules.modules.remove(&name).ok_or(Failure::InvalidHandle)?;
    if let Module::Coming(bytes) | Module::Whole(bytes) = &module {
        cx.state.modules.bytes -= bytes.len() as u64;
    }
    cx.state.memory.remove_variables(name);
    let kernels = &mut cx.state.modules.kernels;
    let gone: Vec<_> = kernels.extract_if(.., |_, (of, _)| *of == name).collect();
    for (kernel, _) in gone {
        cx.take::<calls::CudaKernelT>(Handle::from_raw(kernel))?;
    }
    unload(cx.libraries, &module)
}

pub(crate) fn basaltModuleLoad(cx: &mut Context<'_>, call: &calls::BasaltModuleLoad) -> Result<(), Failure> {
    let modules = &mut cx.state.modules.modules;
    let name = call.module.raw();
    if modules.contains_key(&name) {
        return Err(Failure::InvalidValue);
    }
    if modules.len() >= MOST {
        return Err(Failure::OutOfMemory);
    }
    modules.insert(name, Module::Coming(Vec::new()));
    Ok(())
}

/// A client's variables are where the library has them, so that it chooses no addresses for them.
pub(crate) fn basaltModuleVariable(_: &mut Context<'_>, _: &calls::BasaltModuleVariable<'_>) -> Result<(), Failure> {
    Err(Failure::NotServed)
}

pub(crate) fn basaltModuleData(cx: &mut Context<'_>, call: &calls::BasaltModuleData) -> Result<(), Failure> {
    let piece = cx.copy_of(call.bytes)?;
    let modules = &mut cx.state.modules;
    let module = modules
        .modules
        .get_mut(&call.module.raw())
        .ok_or(Failure::InvalidHandle)?;
    let Module::Coming(bytes) = module else {
        return Err(Failure::InvalidValue);
    };
    let end = call.offset.checked_add(call.count).ok_or(Failure::InvalidValue)?;
    if call.offset != bytes.len() as u64 || piece.len() as u64 != call.count || end > call.total {
        return Err(Failure::InvalidValue);
    }
    if modules.bytes.checked_add(call.count).is_none_or(|all| all > MOST_BYTES) {
        return Err(Failure::OutOfMemory);
    }
    modules.bytes += call.count;
    bytes.extend_from_slice(&piece);
    if end == call.total {
        let whole = std::mem::take(bytes);
        *module = Module::Whole(whole);
    }
    Ok(())
}

pub(crate) fn basaltModuleGetFunction(
    cx: &mut Context<'_>,
    call: &calls::BasaltModuleGetFunction<'_>,
) -> Result<(), Failure> {
    cx.can_make(call.kernel)?;
    let library = cx.state.modules.load(cx.libraries, call.module.raw())?;
    let function = cx.libraries.runtime.cudaLibraryGetKernel()?;
    let mut kernel: P = std::ptr::null_mut();
    let name = call.name.as_ptr().cast_mut().cast();
    // SAFETY: 1. the function has these types; 2. there is a place for the kernel; 3. the library is loaded; 4. the name ends with a zero.
    let status = unsafe { function((&raw mut kernel).cast(), library, name) };
    if status == NOT_FOUND {
        return Err(INVALID_FUNCTION);
    }
    check(status)?;
    let layout = layout(cx.libraries, kernel)?;
    cx.made(call.kernel, kernel);
    let word = |bytes: usize| number::<_, u32>(bytes);
    let asked = usize::try_from(call.most).unwrap_or(usize::MAX);
    let places = || layout.parameters.iter().take(asked);
    let offsets: Result<Vec<_>, _> = places().map(|(begin, _)| word(*begin)).collect();
    let sizes: Result<Vec<_>, _> = places().map(|(_, length)| word(*length)).collect();
    let (count, size) = (word(layout.parameters.len())?, word(layout.size)?);
    let module = call.module.raw();
    cx.state.modules.kernels.insert(call.kernel.raw(), (module, layout));
    cx.answer(&AnyReply::BasaltModuleGetFunction(
        calls::BasaltModuleGetFunctionReply {
            status: 0,
            count,
            size,
            offsets: List::new(&offsets?),
            sizes: List::new(&sizes?),
        },
    ));
    Ok(())
}

/// Where a kernel's parameters are: the driver is asked for one after the other until there is none.
fn layout(libraries: &Libraries, kernel: P) -> Result<Layout, Failure> {
    let function = libraries.driver()?.cuKernelGetParamInfo()?;
    let mut layout = Layout::default();
    loop {
        let (mut begin, mut length) = (0_usize, 0_usize);
        let index = layout.parameters.len();
        // SAFETY: 1. the function has these types, as a kernel of the runtime's is one of the driver's; 2. there are places for both numbers.
        let status = unsafe { function(kernel, index, (&raw mut begin).cast(), (&raw mut length).cast()) };
        if status == NO_PARAMETER {
            return Ok(layout);
        }
        check(status)?;
        let end = begin.checked_add(length).filter(|end| *end <= MOST_ARGUMENTS);
        layout.size = layout.size.max(end.ok_or(INVALID_IMAGE)?);
        layout.parameters.push((begin, length));
        if index >= MOST_PARAMETERS {
            return Err(INVALID_IMAGE);
        }
    }
}

pub(crate) fn basaltModuleGetVariable(
    cx: &mut Context<'_>,
    call: &calls::BasaltModuleGetVariable<'_>,
) -> Result<(), Failure> {
    let library = cx.state.modules.load(cx.libraries, call.module.raw())?;
    let function = cx.libraries.runtime.cudaLibraryGetGlobal()?;
    let mut place: P = std::ptr::null_mut();
    let mut size = 0_usize;
    let name = call.name.as_ptr().cast_mut().cast();
    // SAFETY: 1. the function has these types; 2. there are places for the address and the size; 3. the library is loaded; 4. the name ends
    // with a zero.
    let status = unsafe { function((&raw mut place).cast(), (&raw mut size).cast(), library, name) };
    if status == NOT_FOUND || (status == 0 && place.is_null()) {
        return Err(INVALID_SYMBOL);
    }
    check(status)?;
    cx.state.memory.has_room()?;
    let begin = place.expose_provenance() as u64;
    let module = call.module.raw();
    cx.state.memory.add_variable(module, begin, size as u64);
    cx.answer(&AnyReply::BasaltModuleGetVariable(
        calls::BasaltModuleGetVariableReply {
            status: 0,
            address: begin,
            size: size as u64,
        },
    ));
    Ok(())
}

/// An allocation where the library puts it.
pub(crate) fn basaltMalloc(cx: &mut Context<'_>, call: &calls::BasaltMalloc) -> Result<(), Failure> {
    let dev_ptr = super::memory::allocate(cx, call.size)?;
    cx.answer(&AnyReply::BasaltMalloc(calls::BasaltMallocReply { status: 0, dev_ptr }));
    Ok(())
}

pub(crate) fn cudaLaunchKernel(cx: &mut Context<'_>, call: &calls::CudaLaunchKernel<'_>) -> Result<(), Failure> {
    let function = cx.libraries.runtime.cudaLaunchKernel()?;
    let (kernel, stream) = (cx.object(call.kernel)?, cx.object(call.stream)?);
    let layout = cx.state.modules.kernels.get(&call.kernel.raw());
    let (_, layout) = layout.ok_or(INVALID_FUNCTION)?;
    if call.args.len() != layout.size {
        return Err(Failure::InvalidValue);
    }
    let arguments = Bytes::of(Some(&call.args));
    let block = arguments.address().cast::<u8>();
    // Each begins within the block, and ends there, as the layout was made.
    let mut places: Vec<P> = layout
        .parameters
        .iter()
        .map(|(begin, _)| block.wrapping_add(*begin).cast())
        .collect();
    let (grid, threads) = (dim3(&call.grid_dim)?, dim3(&call.block_dim)?);
    let shared = number(call.shared_mem)?;
    // SAFETY: 1. the function has these types; 2. the kernel and the stream are the client's; 3. there is a place for each parameter, with as
    // many bytes as it has, which the runtime copies.
    check(unsafe { function(kernel, grid, threads, places.as_mut_ptr().cast(), shared, stream) })
}

fn dim3(bytes: &List<'_, u8>) -> Result<Dim3, Failure> {
    let word = |index: usize| {
        let four = bytes
            .bytes()
            .get(4 * index..4 * index + 4)
            .and_then(<[u8]>::first_chunk);
        four.map(|four| u32::from_le_bytes(*four)).ok_or(Failure::InvalidValue)
    };
    Ok(Dim3 {
        x: word(0)?,
        y: word(1)?,
        z: word(2)?,
    })
}

impl Context<'_> {
    /// Bytes of the arena, copied.
    fn copy_of(&self, span: Span) -> Result<Vec<u8>, Failure> {
        let length = number(span.length)?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(length).map_err(|_| Failure::OutOfMemory)?;
        bytes.resize(length, 0);
        if self.read(span, &mut bytes) {
            Ok(bytes)
        } else {
            Err(Failure::InvalidValue)
        }
    }
}
