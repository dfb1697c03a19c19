//! A client's objects, and what each call does to them.
//!
//! What follows from annotations (which objects a call makes, needs and drops, which addresses it names) is done for every call alike;
//! by name are known only the calls about memory.

use accel_proto::Memory as At;
use accel_proto::Object;
use accel_proto::cuda::{AnyCall, AnyReply};

use crate::memory::{Memory, Quota};
use crate::objects::{Failure, Objects};

/// A client's.
#[derive(Debug)]
pub struct State {
    /// Bytes of the device's memory, as the client is told.
    total: u64,
    objects: Objects,
    memory: Memory,
    /// The first failure of a call that nobody waited for.
    failed: Option<Failure>,
}

impl State {
    /// Of a client that may have so many bytes.
    #[must_use]
    pub fn new(total: u64) -> Self {
        Self {
            total,
            objects: Objects::default(),
            memory: Memory::default(),
            failed: None,
        }
    }

    /// Carries a call out. The reply is what is answered if anybody waits; with what failed now, for whoever counts.
    pub fn carry_out(
        &mut self,
        call: &AnyCall<'_>,
        waits: bool,
        quota: &mut dyn Quota,
    ) -> (AnyReply<'static>, Option<Failure>) {
        let failure = self.apply(call, quota).err();
        if !waits {
            self.failed = self.failed.or(failure);
        }
        let told = self.failed.or(failure);
        let reply = match told {
            Some(failure) => call.failed(failure.code()),
            None => self.reply(call),
        };
        (reply, failure)
    }

    /// Bytes that the client has.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.memory.used()
    }

    fn apply(&mut self, call: &AnyCall<'_>, quota: &mut dyn Quota) -> Result<(), Failure> {
        if sets_nothing(call) {
            return Ok(());
        }
        let mut result = Ok(());
        call.effects(&mut |effect, object| {
            if result.is_ok() {
                result = match object {
                    Object::Svm(address) => self.memory.check(address.0, 0),
                    Object::Handle(handle) => self.objects.affect(effect, handle),
                };
            }
        });
        result?;
        match call {
            AnyCall::CudaMalloc(call) => self.memory.add(call.dev_ptr, call.size, quota),
            AnyCall::CudaFree(call) => self.memory.remove(call.dev_ptr, quota),
            AnyCall::CudaMemset(call) => self.memory.check(call.dev_ptr.0, call.count),
            AnyCall::CudaMemsetAsync(call) => self.memory.check(call.dev_ptr.0, call.count),
            AnyCall::CudaMemcpyAsync(call) => [call.dst, call.src].into_iter().try_for_each(|memory| match memory {
                At::Svm(address) if call.count > 0 => self.memory.check(address.0, call.count),
                At::Svm(_) | At::Arena(_) => Ok(()),
            }),
            AnyCall::CudaMemset2DAsync(call) => self.check_rows(call.dev_ptr.0, call.pitch, call.width, call.height),
            AnyCall::CudaMemcpy2DAsync(call) => [(call.dst, call.dpitch), (call.src, call.spitch)]
                .into_iter()
                .try_for_each(|(memory, pitch)| match memory {
                    At::Svm(address) => self.check_rows(address.0, pitch, call.width, call.height),
                    At::Arena(_) => Ok(()),
                }),
            _ => Ok(()),
        }
    }

    /// Whether rows are in one allocation, from the first one's begin to the last one's end.
    fn check_rows(&self, begin: u64, pitch: u64, width: u64, height: u64) -> Result<(), Failure> {
        let Some(others) = height.checked_sub(1) else {
            return Ok(());
        };
        if pitch < width {
            return Err(Failure::InvalidValue);
        }
        let length = pitch.checked_mul(others).and_then(|others| others.checked_add(width));
        match length.ok_or(Failure::IllegalAddress)? {
            0 => Ok(()),
            length => self.memory.check(begin, length),
        }
    }

    fn reply(&self, call: &AnyCall<'_>) -> AnyReply<'static> {
        crate::answer(call, self.memory.used(), self.total)
    }
}

/// Whether a call sets no byte: then no address has to be right.
fn sets_nothing(call: &AnyCall<'_>) -> bool {
    match call {
        AnyCall::CudaMemset(call) => call.count == 0,
        AnyCall::CudaMemsetAsync(call) => call.count == 0,
        AnyCall::CudaMemset2DAsync(call) => call.width == 0 || call.height == 0,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use accel_proto::cuda::{
        CublasCreateV2, CublasSetWorkspaceV2, CudaFree, CudaMalloc, CudaMemset, CudaMemset2DAsync,
        CudaStreamSynchronize, CudaStreamT,
    };
    use accel_proto::{Handle, SvmAddress};

    use super::*;

    struct Most(u64);

    impl Quota for Most {
        fn charge(&mut self, bytes: u64) -> bool {
            self.0.checked_sub(bytes).map(|left| self.0 = left).is_some()
        }

        fn give_back(&mut self, bytes: u64) {
            self.0 += bytes;
        }
    }

    fn synchronize(stream: u32) -> AnyCall<'static> {
        let stream = Handle::<CudaStreamT>::from_raw(stream);
        AnyCall::CudaStreamSynchronize(CudaStreamSynchronize { stream })
    }

    fn malloc(dev_ptr: u64, size: u64) -> AnyCall<'static> {
        AnyCall::CudaMalloc(CudaMalloc { dev_ptr, size })
    }

    #[test]
    fn what_nobody_waits_for_and_fails_is_told_from_then_on() {
        let (mut state, mut quota) = (State::new(100), Most(100));
        let mut put = |call: &AnyCall<'_>| state.carry_out(call, false, &mut quota).1;
        assert_eq!(put(&malloc(0x1000, 64)), None);
        assert_eq!(put(&malloc(0x2000, 64)), Some(Failure::OutOfMemory));
        let memset = |begin, count| {
            AnyCall::CudaMemset(CudaMemset {
                dev_ptr: SvmAddress(begin),
                value: 0,
                count,
            })
        };
        assert_eq!(put(&memset(0x1000, 64)), None);
        assert_eq!(
            [put(&memset(0, 0)), put(&memset(0x5000, 0))],
            [None; 2],
            "nothing is set"
        );
        assert_eq!(put(&memset(0x1000, 65)), Some(Failure::IllegalAddress));
        let told = |state: &mut State, quota: &mut Most| state.carry_out(&synchronize(0), true, quota).0.status();
        assert_eq!(told(&mut state, &mut quota), 2, "the first one");
        assert_eq!(told(&mut state, &mut quota), 2, "and again");
        assert_eq!((state.used(), quota.0), (64, 36));
    }

    #[test]
    fn rows_are_within_an_allocation_up_to_the_last_ones_end() {
        let (mut state, mut quota) = (State::new(1000), Most(1000));
        let mut ask = |call: &AnyCall<'_>| state.carry_out(call, true, &mut quota).0.status();
        assert_eq!(ask(&malloc(0x1000, 300)), 0);
        let rows = |pitch, width, height| {
            AnyCall::CudaMemset2DAsync(CudaMemset2DAsync {
                dev_ptr: SvmAddress(0x1000),
                pitch,
                value: 0,
                width,
                height,
                stream: Handle::from_raw(0),
            })
        };
        assert_eq!([ask(&rows(100, 100, 3)), ask(&rows(120, 60, 3))], [0, 0]);
        assert_eq!([ask(&rows(120, 61, 3)), ask(&rows(u64::MAX, 1, 3))], [700, 700]);
        assert_eq!(
            [ask(&rows(10, 11, 2)), ask(&rows(0, 0, 5)), ask(&rows(1, 1, 0))],
            [1, 0, 0]
        );
    }

    #[test]
    fn objects_are_of_one_kind_and_there_once() {
        let (mut state, mut quota) = (State::new(100), Most(100));
        let mut ask = |call: &AnyCall<'_>| state.carry_out(call, true, &mut quota).0.status();
        assert_eq!([0, 1, 2, 3].map(|stream| ask(&synchronize(stream))), [0, 0, 0, 400]);
        let create = AnyCall::CublasCreateV2(CublasCreateV2 {
            handle: Handle::from_raw(7),
        });
        assert_eq!([ask(&create), ask(&create)], [0, 1]);
        assert_eq!(ask(&synchronize(7)), 400, "of another kind");
        let workspace = |handle, address| {
            let call = CublasSetWorkspaceV2 {
                handle: Handle::from_raw(handle),
                workspace: SvmAddress(address),
                workspace_size_in_bytes: 8,
            };
            AnyCall::CublasSetWorkspaceV2(call)
        };
        assert_eq!(ask(&malloc(0x1000, 64)), 0);
        assert_eq!(
            [
                ask(&workspace(7, 0)),
                ask(&workspace(7, 0x103f)),
                ask(&workspace(7, 0x1040)),
                ask(&workspace(8, 0))
            ],
            [0, 0, 700, 400]
        );
        assert_eq!(
            [0x1000, 0x1000].map(|dev_ptr| ask(&AnyCall::CudaFree(CudaFree { dev_ptr }))),
            [0, 1]
        );
    }
}
