//! The back end `cuda`, with our own library for the real ones: a program's calls go to a server that carries them out by functions of C,
//! which go to a server with the back end `null`.
//!
//! ```text
//!   program ── library ──▶ server, cuda ── dlopen(the same library) ──▶ server, null
//! ```
//!
//! The library has the names, versions and types of the real ones, so that what the first server calls are the real calls; what they do is
//! not there. The library counts its calls, once in the program and once in this process, which is the first server.

mod support;

use std::collections::BTreeMap;
use std::ffi::{CStr, c_void};
use std::path::Path;

use accel_server::Backend;
use support::chain::{Chain, ended};

/// What the device is said to have, and what the programs may have.
const DEVICE: u64 = 256 << 20;
const QUOTA: u64 = 64 << 20;

/// Functions by the library's numbers.
fn names() -> Vec<String> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/generated/mod.rs");
    let text = std::fs::read_to_string(file).unwrap();
    let (_, list) = text.split_once("NAMES: &[&str] = &[").unwrap();
    let (list, _) = list.split_once("];").unwrap();
    list.split('"').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Calls of each function that was called.
type Counts = BTreeMap<String, u64>;

fn named(counts: impl Iterator<Item = (usize, u64)>) -> Counts {
    let names = names();
    let called = counts.filter(|(_, count)| *count > 0);
    called.map(|(index, count)| (names[index].clone(), count)).collect()
}

/// Those of the library in this process.
#[allow(unsafe_code, reason = "asks the library that the server has loaded")]
fn here(chain: &Chain) -> Counts {
    let path = chain.linked.path().join("libcudart.so.13");
    let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    let flags = libc::RTLD_NOW | libc::RTLD_NOLOAD;
    // SAFETY: 1. the name ends with a zero; 2. the library is loaded already, and stays.
    let handle = unsafe { libc::dlopen(path.as_ptr(), flags) };
    assert!(!handle.is_null(), "the server has loaded it");
    let name: &CStr = c"basalt_cuda_counters";
    // SAFETY: 1. the handle is dlopen's; 2. the name ends with a zero.
    let function = unsafe { libc::dlsym(handle, name.as_ptr()) };
    assert!(!function.is_null());
    type Counters = unsafe extern "C" fn(*mut u64, *mut u64, usize) -> usize;
    // SAFETY: 1. this is the type of the function of that name.
    let function = unsafe { std::mem::transmute::<*mut c_void, Counters>(function) };
    let mut each = vec![0; names().len()];
    // SAFETY: 1. there is room for as many numbers as are said, and none for the others.
    unsafe { function(std::ptr::null_mut(), each.as_mut_ptr(), each.len()) };
    named(each.into_iter().enumerate())
}

/// What the program prints: numbers of functions and calls.
fn printed(stdout: &[u8]) -> Counts {
    let text = String::from_utf8(stdout.to_vec()).unwrap();
    let pairs = text.lines().filter_map(|line| line.strip_prefix("calls "));
    named(pairs.map(|pair| {
        let (index, count) = pair.split_once(' ').unwrap();
        (index.parse().unwrap(), count.parse().unwrap())
    }))
}

/// Functions of which the server calls more than the program does: it waits for copies, and looks at memory itself. With how the program has
/// them, if by another name.
const MORE: [&str; 7] = [
    "cudaMemGetInfo",
    "cudaStreamSynchronize",
    "cudaEventRecord",
    "cudaEventSynchronize",
    "cudaEventCreateWithFlags",
    "cudaEventDestroy",
    "cudaDeviceSynchronize",
];

#[test]
fn what_a_program_asks_for_is_what_the_libraries_are_asked_for() {
    // One test, as the counters are of the process.
    let chain = Chain::new("tests/chain/main.c", (Backend::null(), DEVICE), QUOTA);
    let before = here(&chain);
    let output = chain.linked.run("works", &[]);
    let stats = ended(&chain.first, 0);
    let after = here(&chain);
    let asked = printed(&output.stdout);
    let counted = |name: &str| {
        let of = |counts: &Counts| counts.get(name).copied().unwrap_or_default();
        of(&after) - of(&before)
    };
    // What the program has that is the client's alone is not asked for; what crosses is, as often as the program has asked.
    let crosses = crossing();
    let mut compared = 0;
    for name in crosses.iter().filter(|name| !MORE.contains(&name.as_str())) {
        let by_program = asked.get(name).copied().unwrap_or_default();
        // One handle of cuBLAS' is for calls of cublasLt, which name none.
        let own = u64::from(["cublasCreate_v2", "cublasDestroy_v2"].contains(&name.as_str()));
        assert_eq!(counted(name), by_program + own, "{name}");
        compared += usize::from(by_program > 0);
    }
    assert!(compared > 45, "{compared} functions were called: {asked:?}");
    for name in MORE {
        assert!(counted(name) >= asked.get(name).copied().unwrap_or_default(), "{name}");
    }
    let waited = counted("cudaEventSynchronize") - asked["cudaEventSynchronize"];
    assert!(
        waited > 5,
        "copies out of the arena are waited for before anything is answered: {waited}"
    );
    let events = counted("cudaEventCreate") + counted("cudaEventCreateWithFlags");
    assert_eq!(
        counted("cudaEventDestroy"),
        events,
        "those behind copies are given back, too"
    );
    // Modules: by registration in the program, as libraries on the server.
    assert_eq!(counted("cudaLibraryLoadData"), 1);
    assert_eq!(counted("cudaLibraryUnload"), 1);
    // One of the program's is of a function that it has not registered.
    let launches = asked["cudaLaunchKernel"] + asked["__cudaLaunchKernel"] - 1;
    assert_eq!(counted("cudaLaunchKernel"), launches);
    assert!(stats.errors.is_empty(), "{:?}", stats.errors);
    // What the program has left is given back: in both servers, though the first one is still a client of the second.
    assert_eq!(stats.memory.used, 0);
    assert!(stats.memory.most > 5 << 20);
    let device = ended(&chain.device, 1);
    assert_eq!((device.memory.used, device.memory.quota), (0, Some(DEVICE)));
    assert!(device.memory.most >= stats.memory.most);
    assert!(device.errors.is_empty(), "{:?}", device.errors);

    // Errors: of the server, and of the libraries behind it.
    let most = device.memory.most;
    chain.linked.run("quota", &[]);
    let stats = ended(&chain.first, 0);
    assert_eq!(stats.memory.refused, 1);
    let device = ended(&chain.device, 1);
    assert_eq!(
        (device.memory.refused, device.memory.used),
        (0, 0),
        "the device was not asked"
    );
    assert!(device.memory.most <= most.max(QUOTA));
    chain.linked.run("errors", &[]);
    let stats = ended(&chain.first, 0);
    assert_eq!(stats.memory.used, 0);
    for code in [400, 700, 1, 7] {
        assert!(stats.errors.contains_key(&code), "{code}: {:?}", stats.errors);
    }
    assert!(ended(&chain.device, 1).errors.is_empty(), "the device was not asked");
    // A program that was ended in the middle leaves nothing, either.
    chain.linked.run("left", &[]);
    assert_eq!(ended(&chain.first, 0).memory.used, 0);
    assert_eq!(ended(&chain.device, 1).memory.used, 0);
    nothing_is_left(&here(&chain));
}

/// What was made by the server, for all programs together, has ended.
fn nothing_is_left(counts: &Counts) {
    let count = |name: &&str| counts.get(*name).copied().unwrap_or_default();
    for (makes, ends) in [
        (&["cublasCreate_v2"][..], "cublasDestroy_v2"),
        (&["cudnnCreate"], "cudnnDestroy"),
        (&["curandCreateGenerator"], "curandDestroyGenerator"),
        (&["cudaEventCreate", "cudaEventCreateWithFlags"], "cudaEventDestroy"),
        (
            &[
                "cudaStreamCreate",
                "cudaStreamCreateWithFlags",
                "cudaStreamCreateWithPriority",
            ],
            "cudaStreamDestroy",
        ),
        (&["cudaLibraryLoadData"], "cudaLibraryUnload"),
        (&["cudnnCreateTensorDescriptor"], "cudnnDestroyTensorDescriptor"),
        (
            &["cudnnCreateConvolutionDescriptor"],
            "cudnnDestroyConvolutionDescriptor",
        ),
        (&["cublasLtMatmulDescCreate"], "cublasLtMatmulDescDestroy"),
        (&["cublasLtMatmulPreferenceCreate"], "cublasLtMatmulPreferenceDestroy"),
    ] {
        let made: u64 = makes.iter().map(count).sum();
        assert!(made > 0, "{makes:?}");
        assert_eq!(made, count(&ends), "{ends}");
    }
}

/// Functions that cross as they are: neither those that the client answers, nor those that it asks for once, nor those that are something
/// else there.
fn crossing() -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let cuda = std::fs::read_to_string(root.join("docs/accel-cuda-calls.md")).unwrap();
    let rows = cuda.lines().filter_map(|line| line.strip_prefix("| `"));
    let crosses = rows.filter_map(|row| {
        let (name, rest) = row.split_once("` | ")?;
        let is_own = !name.starts_with("__cuda")
            && !["cudaMemcpyAsync", "cudaMemcpy2DAsync", "cudaMemset2DAsync"].contains(&name);
        (is_own && !rest.starts_with("local")).then(|| name.to_owned())
    });
    crosses.collect()
}
