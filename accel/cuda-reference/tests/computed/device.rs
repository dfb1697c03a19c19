//! A client: its state, its quota and its arena, and what tests do with them again and again.

use std::sync::atomic::AtomicBool;

use accel_cuda_null::Quota;
use accel_proto::cuda::{AnyCall, AnyReply, CudaDeviceSynchronize, CudaFree, CudaMalloc, CudaMemcpyAsync};
use accel_proto::{Handle, Memory, Span, SvmAddress};
use basalt_accel_cuda_reference::{Client, Error, State};

/// Bytes of the arena.
const ARENA: usize = 4 << 20;

pub(crate) struct Host {
    pub(crate) left: u64,
    pub(crate) arena: Vec<u8>,
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
        let place = usize::try_from(offset)
            .ok()
            .and_then(|offset| self.arena.get(offset..offset + into.len()));
        place.is_some_and(|bytes| {
            into.copy_from_slice(bytes);
            true
        })
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> bool {
        let place = usize::try_from(offset)
            .ok()
            .and_then(|offset| self.arena.get_mut(offset..offset + from.len()));
        place.is_some_and(|place| {
            place.copy_from_slice(from);
            true
        })
    }
}

/// Numbers that memory can have.
pub(crate) trait Number: Copy {
    const SIZE: usize;
    fn bytes(self) -> Vec<u8>;
    fn of(bytes: &[u8]) -> Self;
}

macro_rules! number {
    ($($type:ty),*) => {$(
        impl Number for $type {
            const SIZE: usize = size_of::<$type>();

            fn bytes(self) -> Vec<u8> {
                self.to_le_bytes().to_vec()
            }

            fn of(bytes: &[u8]) -> Self {
                Self::from_le_bytes(bytes.try_into().unwrap())
            }
        }
    )*};
}

number!(u8, u16, i32, u32, u64, f32, f64);

pub(crate) struct Device {
    pub(crate) state: State,
    pub(crate) host: Host,
    pub(crate) stop: AtomicBool,
    next: u64,
}

impl Device {
    pub(crate) fn new() -> Self {
        Self::with(64 << 20, 64 << 20)
    }

    /// One with so many bytes of its own and of the quota.
    pub(crate) fn with(own: u64, quota: u64) -> Self {
        Self {
            state: State::new(own),
            host: Host {
                left: quota,
                arena: vec![0; ARENA],
            },
            stop: AtomicBool::new(false),
            next: 0x7000_0000_0000,
        }
    }

    /// Puts a call and goes on.
    pub(crate) fn put(&mut self, call: &AnyCall<'_>) -> Result<(), Error> {
        self.state.carry_out(call, (&mut self.host, &self.stop), None)
    }

    /// Asks: what is taken of the reply.
    pub(crate) fn ask<R>(&mut self, call: &AnyCall<'_>, mut take: impl FnMut(&AnyReply<'_>) -> R) -> R {
        let mut taken = None;
        let mut answer = |reply: &AnyReply<'_>| taken = Some(take(reply));
        _ = self
            .state
            .carry_out(call, (&mut self.host, &self.stop), Some(&mut answer));
        taken.expect("whoever waits is answered")
    }

    pub(crate) fn status(&mut self, call: &AnyCall<'_>) -> i32 {
        self.ask(call, |reply| reply.status())
    }

    pub(crate) fn synchronize(&mut self) -> i32 {
        self.status(&AnyCall::CudaDeviceSynchronize(CudaDeviceSynchronize {}))
    }

    pub(crate) fn allocate(&mut self, size: usize) -> SvmAddress {
        let address = SvmAddress(self.next);
        self.next += (size as u64).next_multiple_of(256) + 256;
        self.put(&AnyCall::CudaMalloc(CudaMalloc {
            dev_ptr: address.0,
            size: size as u64,
        }))
        .unwrap();
        address
    }

    /// Addresses of memory that another has are not taken.
    pub(crate) fn skip(&mut self, other: &Self) {
        self.next = self.next.max(other.next);
    }

    pub(crate) fn free(&mut self, address: SvmAddress) {
        self.put(&AnyCall::CudaFree(CudaFree { dev_ptr: address.0 })).unwrap();
    }

    /// Memory with these bytes, by way of the arena.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> SvmAddress {
        let address = self.allocate(bytes.len().max(1));
        self.host.arena[..bytes.len()].copy_from_slice(bytes);
        self.put(&copy(Memory::Svm(address), arena(0, bytes.len()), bytes.len()))
            .unwrap();
        address
    }

    pub(crate) fn upload<N: Number>(&mut self, numbers: &[N]) -> SvmAddress {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.bytes()).collect();
        self.bytes(&bytes)
    }

    pub(crate) fn read(&mut self, address: SvmAddress, size: usize) -> Vec<u8> {
        assert_eq!(self.status(&copy(arena(16, size), Memory::Svm(address), size)), 0);
        self.host.arena[16..16 + size].to_vec()
    }

    pub(crate) fn download<N: Number>(&mut self, address: SvmAddress, count: usize) -> Vec<N> {
        let bytes = self.read(address, count * N::SIZE);
        bytes.chunks_exact(N::SIZE).map(N::of).collect()
    }

    /// The same, of the type that computes.
    pub(crate) fn wide(&mut self, address: SvmAddress, kind: Kind, count: usize) -> Vec<f64> {
        match kind {
            Kind::F32 => self
                .download::<f32>(address, count)
                .into_iter()
                .map(f64::from)
                .collect(),
            Kind::F64 => self.download(address, count),
            Kind::F16 => self.download::<u16>(address, count).into_iter().map(half).collect(),
            Kind::Bf16 => {
                let wide = |bits: u16| f64::from(f32::from_bits(u32::from(bits) << 16));
                self.download::<u16>(address, count).into_iter().map(wide).collect()
            }
        }
    }

    /// Numbers in memory as elements of that type; they have few digits, so that all types have them.
    pub(crate) fn elements(&mut self, kind: Kind, numbers: &[f64]) -> SvmAddress {
        #[expect(clippy::cast_possible_truncation, reason = "a test's numbers have few digits")]
        let single = |number: &f64| *number as f32;
        match kind {
            Kind::F32 => self.upload(&numbers.iter().map(single).collect::<Vec<f32>>()),
            Kind::F64 => self.upload(numbers),
            Kind::F16 => self.upload(&numbers.iter().map(|number| to_half(*number)).collect::<Vec<u16>>()),
            Kind::Bf16 => {
                let upper = |number: &f64| u16::try_from(single(number).to_bits() >> 16).unwrap();
                self.upload(&numbers.iter().map(upper).collect::<Vec<u16>>())
            }
        }
    }
}

/// Types of elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    F32,
    F64,
    F16,
    Bf16,
}

impl Kind {
    pub(crate) const ALL: [Self; 4] = [Self::F32, Self::F64, Self::F16, Self::Bf16];

    /// `cudnnDataType_t`.
    pub(crate) fn cudnn(self) -> i32 {
        [0, 1, 2, 9][self as usize]
    }

    /// `cudaDataType`.
    pub(crate) fn cuda(self) -> i32 {
        [0, 1, 2, 14][self as usize]
    }

    /// How far from the exact result one may be that is about as large as this.
    pub(crate) fn tolerance(self, size: f64) -> f64 {
        [2e-5, 1e-12, 2e-3, 1.6e-2][self as usize] * (1.0 + size)
    }

    /// A scalar for calls with such elements.
    pub(crate) fn scalar(self, value: f64) -> Vec<u8> {
        #[expect(clippy::cast_possible_truncation, reason = "a test's numbers have few digits")]
        match self {
            Self::F64 => value.bytes(),
            _ => (value as f32).bytes(),
        }
    }
}

fn half(bits: u16) -> f64 {
    let sign = if bits >> 15 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 0x3ff));
    match exponent {
        0 => sign * fraction * 2f64.powi(-24),
        31 => f64::NAN,
        _ => sign * (1.0 + fraction / 1024.0) * 2f64.powi(exponent - 15),
    }
}

/// Of a number that a half can be, and that is zero or not tiny.
fn to_half(number: f64) -> u16 {
    if number == 0.0 {
        return 0;
    }
    let exponent = number.abs().log2().floor();
    let fraction = (number.abs() / exponent.exp2() - 1.0) * 1024.0;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "both are small whole numbers"
    )]
    let bits = ((exponent + 15.0) as u16) << 10 | fraction as u16;
    bits | if number < 0.0 { 0x8000 } else { 0 }
}

pub(crate) fn arena(offset: usize, length: usize) -> Memory {
    Memory::Arena(Span {
        offset: offset as u64,
        length: length as u64,
    })
}

pub(crate) fn copy(dst: Memory, src: Memory, count: usize) -> AnyCall<'static> {
    AnyCall::CudaMemcpyAsync(CudaMemcpyAsync {
        dst,
        src,
        count: count as u64,
        kind: 4,
        stream: Handle::NULL,
    })
}

/// A generator of tests' numbers (Knuth's MMIX).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    pub(crate) fn below(&mut self, most: usize) -> usize {
        usize::try_from(self.next() % most as u64).unwrap()
    }

    /// From `least` to `most`.
    pub(crate) fn size(&mut self, least: usize, most: usize) -> usize {
        least + self.below(most - least + 1)
    }

    /// A multiple of 1/8 from -2 to 2, which all types have.
    pub(crate) fn number(&mut self) -> f64 {
        f64::from(u32::try_from(self.below(33)).unwrap()) / 8.0 - 2.0
    }

    pub(crate) fn numbers(&mut self, count: usize) -> Vec<f64> {
        (0..count).map(|_| self.number()).collect()
    }
}

/// A size as C has it.
pub(crate) fn int(size: usize) -> i32 {
    i32::try_from(size).unwrap()
}

/// Compares what was computed with what the formula gives.
pub(crate) fn close(kind: Kind, computed: &[f64], wanted: &[f64], what: &str) {
    assert_eq!(computed.len(), wanted.len(), "{what}");
    for (at, (computed, wanted)) in computed.iter().zip(wanted).enumerate() {
        assert!(
            (computed - wanted).abs() <= kind.tolerance(wanted.abs()),
            "{what}: {computed} at {at} where {wanted} is wanted"
        );
    }
}
