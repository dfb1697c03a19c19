//! CUDA on the back end that computes: memory and time are the tenant's, and a kernel without end is its own client's alone.

use std::ffi::CStr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use accel_proto::cuda::*;
use accel_proto::{Handle, List, Memory, Reader, Reply, Span, SvmAddress};
use accel_window::{Geometry, Window};

use super::{ARENA, Caller, LIMITS, REPLIES};
use crate::api::Backend;
use crate::meter::Work;
use crate::session::Client;
use crate::tenant::{Tenant, TenantLimits};

const PTX: &str = include_str!("../../../ptx/tests/ptx/language.ptx");
const QUOTA: u64 = 4 << 20;
const MODULE: Handle<CudaModuleT> = Handle::from_raw(9000);
const KERNEL: Handle<CudaKernelT> = Handle::from_raw(9001);
/// Where the arena has what is copied.
const DATA: u64 = 1 << 18;

fn tenant() -> Arc<Tenant> {
    let limits = TenantLimits {
        memory: Some(QUOTA),
        measures_time: true,
        ..TenantLimits::default()
    };
    Tenant::new(&limits).unwrap()
}

fn client(tenant: &Arc<Tenant>) -> Client {
    let (_, window) = Window::create(Geometry::new(1, 2, ARENA).unwrap()).unwrap();
    Client::new(Arc::new(Backend::reference()), Arc::clone(tenant), Some(window))
}

fn span(length: u64) -> Span {
    Span { offset: DATA, length }
}

fn synchronize(caller: &mut Caller<'_>) -> i32 {
    caller.status(&CudaDeviceSynchronize {})
}

fn copy(caller: &mut Caller<'_>, dst: Memory, src: Memory, count: u64) -> i32 {
    let stream = Handle::NULL;
    caller.status(&CudaMemcpyAsync {
        dst,
        src,
        count,
        kind: 4,
        stream,
    })
}

/// A fat binary of one text, not compressed.
fn container() -> Vec<u8> {
    let mut entry = vec![0; 64];
    (entry[0], entry[4], entry[28]) = (1, 64, 75);
    entry[8..16].copy_from_slice(&(PTX.len() as u64).to_le_bytes());
    let mut whole = 0xba55_ed50_u32.to_le_bytes().to_vec();
    whole.extend([1, 0, 16, 0]);
    whole.extend((64 + PTX.len() as u64).to_le_bytes());
    whole.extend(entry);
    whole.extend(PTX.as_bytes());
    whole
}

/// Loads the module, and a kernel of it.
fn load(caller: &mut Caller<'_>, name: &CStr) {
    let bytes = container();
    let total = bytes.len() as u64;
    assert_eq!(
        caller.status(&BasaltModuleLoad {
            module: MODULE,
            index: 0
        }),
        0
    );
    let region = caller.client.window.as_ref().unwrap().slice(DATA, total).unwrap();
    region.write(0, &bytes).unwrap();
    let data = BasaltModuleData {
        module: MODULE,
        offset: 0,
        total,
        count: total,
        bytes: span(total),
    };
    assert_eq!(caller.status(&data), 0);
    let get = BasaltModuleGetFunction {
        kernel: KERNEL,
        module: MODULE,
        name,
        most: 8,
        reply: REPLIES,
    };
    assert_eq!(caller.status(&get), 0);
}

fn launch<'a>(dims: &'a [u8; 12], args: &'a [u8]) -> CudaLaunchKernel<'a> {
    CudaLaunchKernel {
        kernel: KERNEL,
        grid_dim: List::new(dims),
        block_dim: List::new(dims),
        args: List::new(args),
        shared_mem: 0,
        stream: Handle::NULL,
    }
}

const ONE: [u8; 12] = [1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0];

#[test]
fn what_is_computed_is_the_clients_and_what_it_takes_the_tenants() {
    let tenant = tenant();
    let client = client(&tenant);
    let mut caller = Caller::new(&client);
    assert_eq!(
        caller.status(&CudaMalloc {
            dev_ptr: 0x10_0000,
            size: QUOTA + 1
        }),
        2
    );
    assert_eq!(
        caller.status(&CudaMalloc {
            dev_ptr: 0x10_0000,
            size: 1 << 20
        }),
        0
    );
    assert_eq!(tenant.quota.used(), 1 << 20);
    // What a neighbour has, nobody else can have.
    let neighbour = self::client(&tenant);
    let mut other = Caller::new(&neighbour);
    let malloc = |size| CudaMalloc {
        dev_ptr: 0x10_0000,
        size,
    };
    assert_eq!(other.status(&malloc(QUOTA)), 2);
    assert_eq!(other.status(&malloc(QUOTA - (1 << 20))), 0);
    neighbour.end();
    drop(neighbour);
    assert_eq!(tenant.quota.used(), 1 << 20);
    let numbers: Vec<u8> = [1.0_f32, 2.0, 3.0]
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect();
    let window = client.window.as_ref().unwrap();
    window.slice(DATA, 12).unwrap().write(0, &numbers).unwrap();
    let x = SvmAddress(0x10_0000);
    assert_eq!(copy(&mut caller, Memory::Svm(x), Memory::Arena(span(12)), 12), 0);
    let handle = Handle::from_raw(5000);
    caller.send(&CublasCreateV2 { handle });
    let alpha = (-2.0_f32).to_le_bytes();
    caller.send(&CublasSscalV2 {
        handle,
        n: 3,
        alpha: List::new(&alpha),
        x,
        incx: 1,
    });
    let call = CublasSasumV2 {
        handle,
        n: 3,
        x,
        incx: 1,
    };
    let bytes = caller.ask(&call);
    let reply = CublasSasumV2Reply::read(&mut Reader::new(&bytes, LIMITS), &call).unwrap();
    assert_eq!((reply.status(), f32::from_bits(reply.result)), (0, 12.0));
    assert_eq!(copy(&mut caller, Memory::Arena(span(12)), Memory::Svm(x), 12), 0);
    let mut read = [0; 12];
    window.slice(DATA, 12).unwrap().read(0, &mut read).unwrap();
    assert_eq!(read[..4], (-2.0_f32).to_le_bytes());
    let meter = tenant.meter.as_ref().unwrap();
    assert_eq!((meter.done(Work::Transfer), meter.done(Work::Launch)), (2, 2));
    assert_eq!(tenant.counters.all_failed().get(&2), Some(&2));
    client.end();
    drop(client);
    assert_eq!(tenant.quota.used(), 0);
}

#[test]
fn a_kernel_without_end_holds_nobody_else_up_and_ends_with_its_client() {
    let tenant = tenant();
    let (client, other) = (client(&tenant), client(&tenant));
    let begun = Instant::now();
    thread::scope(|scope| {
        let working = scope.spawn(|| {
            let mut caller = Caller::new(&client);
            assert_eq!(
                caller.status(&CudaMalloc {
                    dev_ptr: 0x10_0000,
                    size: 4
                }),
                0
            );
            load(&mut caller, c"endless_loop");
            caller.send(&launch(&ONE, &0x10_0000_u64.to_le_bytes()));
            // It has ended because nobody is there any more; whoever asked now would hear that.
            assert_eq!(synchronize(&mut caller), 702);
        });
        let mut caller = Caller::new(&other);
        while tenant.quota.used() < container().len() as u64 {
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(Duration::from_millis(100));
        let asked = Instant::now();
        assert_eq!(
            caller.status(&CudaMalloc {
                dev_ptr: 0x10_0000,
                size: 4
            }),
            0
        );
        assert_eq!(synchronize(&mut caller), 0);
        assert!(asked.elapsed() < Duration::from_secs(5) && !working.is_finished());
        client.abandon();
        working.join().unwrap();
    });
    assert!(begun.elapsed() < Duration::from_secs(60));
    let used = Duration::from_nanos(tenant.meter.as_ref().unwrap().used());
    assert!(used > Duration::from_millis(20) && used < begun.elapsed(), "{used:?}");
    for client in [client, other] {
        client.end();
    }
    assert_eq!(tenant.quota.used(), 0);
}

#[test]
fn it_has_nothing_of_opencl() {
    let tenant = tenant();
    let client = client(&tenant);
    let call = accel_proto::opencl::GetPlatformIDs {
        num_entries: 1,
        platforms: true,
        num_platforms: true,
        reply: REPLIES,
    };
    assert_eq!(Caller::new(&client).status(&call), -59);
    client.end();
}
