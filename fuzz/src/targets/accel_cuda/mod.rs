//! Sequences of CUDA's calls that a hostile client has carried out, on the back end that computes and on the one that does not. An input is
//! calls one behind the other, each as `number u16, length u16, arguments`; arguments that are none are skipped. Before them there are three
//! allocations, a handle of each library, a generator, and a module with a kernel.
//!
//! Besides a panic it is a fault if a call that waits has not one reply, if a reply is none of its call's, if more than the quota is charged,
//! or if a byte of it is nobody's. Half a second after an input began its client is gone, which ends what would take longer.

mod seeds;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use accel_cuda_null::Quota;
use accel_cuda_reference::{Client, State};
use accel_proto::cuda::*;
use accel_proto::samples::{Pool, Samples};
use accel_proto::{Handle, Limits, MESSAGE, Span, SvmAddress, Writer};

use crate::run::{Target, count};

const LIMITS: Limits = Limits { arena: 1 << 16 };
/// Bytes that a client may have charged, and those of each of its allocations.
const BYTES: u64 = 1 << 20;
const ALLOCATION: u64 = 64 << 10;
/// Calls of an input.
const MOST: usize = 64;
/// How long a client waits.
const PATIENCE: Duration = Duration::from_millis(500);

const PTX: &str = include_str!("../../../../accel/ptx/tests/ptx/basics.ptx");

const CUBLAS: Handle<CublasHandleT> = Handle::from_raw(5000);
const CUDNN: Handle<CudnnHandleT> = Handle::from_raw(6000);
const GENERATOR: Handle<CurandGeneratorT> = Handle::from_raw(7000);
const MODULE: Handle<CudaModuleT> = Handle::from_raw(9000);
const KERNEL: Handle<CudaKernelT> = Handle::from_raw(9100);
const PLACES: [SvmAddress; 3] = [SvmAddress(0x10_0000), SvmAddress(0x20_0000), SvmAddress(0x30_0000)];

thread_local! {
    /// How calls have ended so far: the call, and its code.
    static ENDED: RefCell<BTreeSet<u64>> = const { RefCell::new(BTreeSet::new()) };
}

struct Host {
    left: u64,
    arena: Vec<u8>,
}

impl Quota for Host {
    fn charge(&mut self, bytes: u64) -> bool {
        self.left.checked_sub(bytes).map(|left| self.left = left).is_some()
    }

    fn give_back(&mut self, bytes: u64) {
        self.left += bytes;
    }
}

impl Client for Host {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> bool {
        let begin = usize::try_from(offset).expect("inside the arena");
        into.copy_from_slice(&self.arena[begin..begin + into.len()]);
        true
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> bool {
        let begin = usize::try_from(offset).expect("inside the arena");
        self.arena[begin..begin + from.len()].copy_from_slice(from);
        true
    }
}

fn written(write: impl Fn(&mut Writer<'_>)) -> Vec<u8> {
    let mut bytes = vec![0; MESSAGE];
    let mut writer = Writer::new(&mut bytes);
    write(&mut writer);
    let length = writer.finish().expect("what was accepted is no longer than a message");
    bytes.truncate(length);
    bytes
}

/// Both back ends with what is there before an input.
struct Devices<'s> {
    computes: (State, Host),
    null: (accel_cuda_null::State, Host),
    stop: &'s AtomicBool,
    /// How a call ended as none has before; zero if none did.
    outcome: u64,
}

impl<'s> Devices<'s> {
    fn new(stop: &'s AtomicBool) -> Self {
        let host = || Host {
            left: BYTES,
            arena: vec![0; 1 << 16],
        };
        let mut devices = Self {
            computes: (State::new(BYTES), host()),
            null: (accel_cuda_null::State::new(BYTES), host()),
            stop,
            outcome: 0,
        };
        for place in PLACES {
            devices.carry_out(
                &AnyCall::CudaMalloc(CudaMalloc {
                    dev_ptr: place.0,
                    size: ALLOCATION,
                }),
                true,
            );
        }
        devices.carry_out(&AnyCall::CublasCreateV2(CublasCreateV2 { handle: CUBLAS }), false);
        devices.carry_out(&AnyCall::CudnnCreate(CudnnCreate { handle: CUDNN }), false);
        let generator = CurandCreateGenerator {
            generator: GENERATOR,
            rng_type: 100,
        };
        devices.carry_out(&AnyCall::CurandCreateGenerator(generator), true);
        devices.load();
        devices
    }

    fn load(&mut self) {
        let mut entry = vec![0; 64];
        (entry[0], entry[4], entry[28]) = (1, 64, 75);
        entry[8..16].copy_from_slice(&(PTX.len() as u64).to_le_bytes());
        let mut bytes = 0xba55_ed50_u32.to_le_bytes().to_vec();
        bytes.extend([1, 0, 16, 0]);
        bytes.extend((64 + PTX.len() as u64).to_le_bytes());
        bytes.extend(entry);
        bytes.extend(PTX.as_bytes());
        self.computes.1.arena[..bytes.len()].copy_from_slice(&bytes);
        let total = bytes.len() as u64;
        let data = BasaltModuleData {
            module: MODULE,
            offset: 0,
            total,
            count: total,
            bytes: Span {
                offset: 0,
                length: total,
            },
        };
        self.carry_out(
            &AnyCall::BasaltModuleLoad(BasaltModuleLoad {
                module: MODULE,
                index: 0,
            }),
            false,
        );
        self.carry_out(&AnyCall::BasaltModuleData(data), false);
        let function = BasaltModuleGetFunction {
            kernel: KERNEL,
            module: MODULE,
            name: c"saxpy",
            most: 8,
            reply: Span {
                offset: 0,
                length: 4096,
            },
        };
        self.carry_out(&AnyCall::BasaltModuleGetFunction(function), true);
    }

    fn carry_out(&mut self, call: &AnyCall<'_>, waits: bool) {
        let is_reply = |reply: &AnyReply<'_>| {
            let encoded = written(|writer| reply.write(writer));
            assert_eq!(call.decode_reply(&encoded, LIMITS).as_ref(), Ok(reply), "a reply to it");
        };
        let (null, host) = &mut self.null;
        is_reply(&null.carry_out(call, waits, host).0);
        assert_eq!(null.used() + host.left, BYTES, "each byte is somebody's");
        let (state, host) = &mut self.computes;
        let mut answered = 0;
        let mut answer = |reply: &AnyReply<'_>| {
            is_reply(reply);
            answered += 1;
        };
        let taken: Option<&mut dyn FnMut(&AnyReply<'_>)> = if waits { Some(&mut answer) } else { None };
        let done = state.carry_out(call, (host, self.stop), taken);
        assert_eq!(answered, u32::from(waits), "whoever waits is answered once");
        assert_eq!(state.used() + host.left, BYTES, "each byte is somebody's");
        let code = done.map_or_else(|error| error.code(), |()| 0);
        let ended = u64::from(call.op()) << 32 | u64::from(code.unsigned_abs());
        if ENDED.with_borrow_mut(|all| all.insert(ended)) {
            self.outcome = ended;
        }
    }
}

/// Calls one behind the other.
pub(crate) fn calls() -> Target {
    let mut seeds = seeds::valid();
    // All of them in one, and calls at random.
    seeds.push(seeds.concat());
    let pool = Pool::new(5);
    for op in OPS {
        for seed in 0..3 {
            if let Ok(call) = AnyCall::read(*op, &mut Samples::new(seed, &pool, LIMITS)) {
                seeds.push(encoded(&call));
            }
        }
    }
    Target {
        name: "accel-cuda-computes",
        seeds,
        parse: take,
    }
}

fn encoded(call: &AnyCall<'_>) -> Vec<u8> {
    let arguments = written(|writer| call.write(writer));
    let length = u16::try_from(arguments.len()).expect("a seed is short");
    [&call.op().to_le_bytes(), &length.to_le_bytes(), &arguments[..]].concat()
}

fn take(input: &[u8]) -> u64 {
    let stop = AtomicBool::new(false);
    let (done, waits) = channel::<()>();
    thread::scope(|scope| {
        scope.spawn(|| {
            let waits = waits;
            if let Err(RecvTimeoutError::Timeout) = waits.recv_timeout(PATIENCE) {
                stop.store(true, Ordering::Relaxed);
            }
        });
        let done = done;
        let mut devices = Devices::new(&stop);
        let (mut rest, mut number) = (input, 0);
        while let [op_low, op_high, low, high, behind @ ..] = rest {
            let length = usize::from(u16::from_le_bytes([*low, *high])).min(behind.len());
            let (arguments, next) = behind.split_at(length);
            rest = next;
            number += 1;
            if number > MOST {
                break;
            }
            let op = u16::from_le_bytes([*op_low, *op_high]);
            if let Ok(call) = AnyCall::decode(op, arguments, LIMITS) {
                count(1);
                devices.carry_out(&call, number % 2 == 0);
            }
        }
        drop(done);
        devices.outcome
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seeds reach what they are for: each succeeds on the back end that computes.
    #[test]
    fn valid_calls_are_computed() {
        let stop = AtomicBool::new(false);
        let seeds = seeds::valid();
        assert_eq!(seeds.len(), 19);
        for seed in seeds {
            let mut devices = Devices::new(&stop);
            let op = u16::from_le_bytes([seed[0], seed[1]]);
            let call = AnyCall::decode(op, &seed[4..], LIMITS).unwrap();
            let (state, host) = &mut devices.computes;
            assert_eq!(state.carry_out(&call, (host, &stop), None), Ok(()), "{call:?}");
        }
    }
}
