//! What a client has, and what each call does to it.
//!
//! ```text
//!   fine ── a failure that nobody waits for ──▶ pending ── told by the next call that waits, which is not carried out ──▶ fine
//!     └── a kernel did wrong ──▶ broken: every later call is told, and nothing is carried out but giving back
//! ```

use std::sync::atomic::AtomicBool;

use accel_cuda_null::{ATTRIBUTES, Objects, Quota};
use accel_proto::cuda::{
    AnyCall, AnyReply, BasaltDeviceInfoReply, BasaltModuleGetFunctionReply, BasaltModuleGetVariableReply,
    CudaEventElapsedTimeReply, CudaFuncGetAttributesReply,
};
use accel_proto::{AnyHandle, Effect, List, Object};
use accel_ptx::{Kernel, Program};

use crate::copies;
use crate::events::Events;
use crate::memory::Memory;
use crate::modules::Modules;
use crate::numeric::Stop;
use crate::random::Generators;
use crate::{Error, blas, convolution, elementwise, lt, normalization, pooling, vectors};

/// What the device is called, with zeroes behind.
pub const DEVICE_NAME: [u8; 64] = {
    let (text, mut name) = (b"Basalt reference", [0; 64]);
    let mut index = 0;
    while index < text.len() {
        name[index] = text[index];
        index += 1;
    }
    name
};

/// Bytes of its memory, unless a tenant has less: what programs for tests need, and a host may have.
pub const TOTAL_MEMORY: u64 = 8 << 30;

/// `cudaDevAttrMultiProcessorCount`. Programs that make as many blocks as the device has room for make few.
const PROCESSORS: (usize, i32) = (16, 4);

/// The client whose calls are carried out: what it may have, and its arena.
pub trait Client: Quota {
    /// Copies bytes out of the arena; whether they are in it.
    fn read(&mut self, offset: u64, into: &mut [u8]) -> bool;

    /// Copies bytes into the arena; whether there is room.
    fn write(&mut self, offset: u64, from: &[u8]) -> bool;
}

/// A client's.
#[derive(Debug)]
pub struct State {
    pub(crate) objects: Objects,
    pub(crate) memory: Memory,
    pub(crate) events: Events,
    pub(crate) modules: Modules,
    pub(crate) generators: Generators,
    pub(crate) pending: Option<Error>,
    pub(crate) broken: Option<Error>,
    pub(crate) total: u64,
}

impl State {
    /// Of a client that may have so many bytes.
    #[must_use]
    pub fn new(total: u64) -> Self {
        Self {
            objects: Objects::default(),
            memory: Memory::new(total),
            events: Events::default(),
            modules: Modules::new(),
            generators: Generators::default(),
            pending: None,
            broken: None,
            total,
        }
    }

    /// Bytes that the client has.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.memory.used()
    }

    /// Carries a call out, and has what is answered to whoever waits taken. It ends soon after `stop` is set. What failed now is for whoever
    /// counts.
    ///
    /// # Errors
    ///
    /// Why the call failed, if it was carried out.
    pub fn carry_out(
        &mut self,
        call: &AnyCall<'_>,
        (client, stop): (&mut dyn Client, &AtomicBool),
        answer: Option<&mut dyn FnMut(&AnyReply<'_>)>,
    ) -> Result<(), Error> {
        let waits = answer.is_some();
        let before = match &self.broken {
            Some(_) if is_always_carried_out(call) => None,
            Some(broken) => Some(broken.clone()),
            None if waits && tells(call) => self.pending.take(),
            None => None,
        };
        if let Some(before) = before {
            if let Some(answer) = answer {
                answer(&call.failed(before.code()));
            }
            return Ok(());
        }
        let failed = match self.apply(call, client, stop) {
            Ok(()) => match answer {
                Some(answer) => self.reply(call, client, answer),
                None => Ok(()),
            },
            Err(error) => {
                if let Some(answer) = answer {
                    answer(&call.failed(error.code()));
                }
                Err(error)
            }
        };
        if let Err(error) = &failed {
            if error.is_sticky() {
                self.broken.get_or_insert(error.clone());
            } else if !waits {
                self.pending.get_or_insert(error.clone());
            }
        }
        failed
    }

    fn apply(&mut self, call: &AnyCall<'_>, client: &mut dyn Client, stop: &AtomicBool) -> Result<(), Error> {
        let (mut result, mut made) = (Ok(()), None);
        call.effects(&mut |effect, object| {
            if result.is_ok() {
                result = match object {
                    Object::Svm(address) => self.memory.check(address.0),
                    Object::Handle(handle) => self.objects.affect(effect, handle),
                };
                if let (Ok(()), Effect::Creates, Object::Handle(handle)) = (result, effect, object) {
                    made = Some(handle);
                }
            }
        });
        let outcome = result
            .map_err(Error::from)
            .and_then(|()| self.compute(call, client, stop));
        if outcome.is_err() {
            self.forget(made);
        }
        outcome
    }

    /// What a call that failed was to make is not there.
    fn forget(&mut self, made: Option<AnyHandle>) {
        if let Some(handle) = made {
            // It is there: it was made a moment ago.
            _ = self.objects.affect(Effect::Drops, handle);
        }
    }

    /// What a call does besides what annotations say.
    fn compute(&mut self, call: &AnyCall<'_>, client: &mut dyn Client, stop: &AtomicBool) -> Result<(), Error> {
        let (memory, looks) = (&mut self.memory, Stop(stop));
        self.events.apply(call);
        if let Some(done) = self.generators.carry_out(call, memory, looks) {
            return done;
        }
        match call {
            AnyCall::CudaMalloc(call) => Ok(memory.add(call.dev_ptr, call.size, client)?),
            AnyCall::CudaFree(call) => Ok(memory.remove(call.dev_ptr, client)?),
            AnyCall::CudaMemset(call) => copies::fill(call.dev_ptr, call.value, call.count, memory),
            AnyCall::CudaMemsetAsync(call) => copies::fill(call.dev_ptr, call.value, call.count, memory),
            AnyCall::CudaMemset2DAsync(call) => copies::fill_rows(call, memory, looks),
            AnyCall::CudaMemcpyAsync(call) => copies::copy(call, memory, client, looks),
            AnyCall::CudaMemcpy2DAsync(call) => copies::copy_rows(call, memory, client, looks),
            AnyCall::BasaltModuleLoad(call) => {
                self.modules.add(call.module.raw());
                Ok(())
            }
            AnyCall::BasaltModuleUnload(call) => {
                self.modules.remove(call.module.raw(), memory, client);
                Ok(())
            }
            AnyCall::BasaltModuleVariable(call) => self.modules.add_variable(call, memory, client),
            AnyCall::BasaltModuleData(call) => self.modules.add_data(call, memory, client),
            AnyCall::BasaltModuleGetFunction(call) => self.modules.get_function(call, memory, client).map(drop),
            AnyCall::CudaLaunchKernel(call) => self.modules.launch(call, memory, stop),
            AnyCall::CublasSgemmV2(call) => blas::sgemm(call, memory, looks),
            AnyCall::CublasDgemmV2(call) => blas::dgemm(call, memory, looks),
            AnyCall::CublasSgemmStridedBatched(call) => blas::sgemm_batched(call, memory, looks),
            AnyCall::CublasDgemmStridedBatched(call) => blas::dgemm_batched(call, memory, looks),
            AnyCall::CublasGemmEx(call) => blas::gemm_ex(call, memory, looks),
            AnyCall::CublasGemmStridedBatchedEx(call) => blas::gemm_batched_ex(call, memory, looks),
            AnyCall::CublasSgemvV2(call) => blas::sgemv(call, memory, looks),
            AnyCall::CublasDgemvV2(call) => blas::dgemv(call, memory, looks),
            AnyCall::CublasLtMatmul(call) => lt::matmul(call, memory, looks),
            AnyCall::CublasLtMatmulAlgoGetHeuristic(call) => lt::check(call),
            other => self.compute_network(other, looks),
        }
    }

    /// The same for cuDNN, and for vectors.
    fn compute_network(&mut self, call: &AnyCall<'_>, stop: Stop<'_>) -> Result<(), Error> {
        let memory = &mut self.memory;
        match call {
            AnyCall::CudnnConvolutionForward(call) => convolution::forward(call, memory, stop),
            AnyCall::CudnnConvolutionBackwardData(call) => convolution::backward_data(call, memory, stop),
            AnyCall::CudnnConvolutionBackwardFilter(call) => convolution::backward_filter(call, memory, stop),
            AnyCall::CudnnConvolutionBackwardBias(call) => elementwise::bias_backward(call, memory),
            AnyCall::CudnnPoolingForward(call) => pooling::forward(call, memory, stop),
            AnyCall::CudnnPoolingBackward(call) => pooling::backward(call, memory, stop),
            AnyCall::CudnnActivationForward(call) => elementwise::activate(call, memory),
            AnyCall::CudnnActivationBackward(call) => elementwise::activate_backward(call, memory),
            AnyCall::CudnnSoftmaxForward(call) => elementwise::softmax(call, memory, stop),
            AnyCall::CudnnSoftmaxBackward(call) => elementwise::softmax_backward(call, memory, stop),
            AnyCall::CudnnAddTensor(call) => elementwise::add(call, memory),
            AnyCall::CudnnBatchNormalizationForwardInference(call) => normalization::inference(call, memory, stop),
            AnyCall::CudnnBatchNormalizationForwardTraining(call) => normalization::training(call, memory, stop),
            AnyCall::CudnnBatchNormalizationForwardTrainingEx(call) => normalization::training_ex(call, memory, stop),
            AnyCall::CudnnBatchNormalizationBackward(call) => normalization::backward(call, memory, stop),
            AnyCall::CudnnBatchNormalizationBackwardEx(call) => normalization::backward_ex(call, memory, stop),
            other => vectors::change(other, memory).unwrap_or(Ok(())),
        }
    }

    /// The answer to a call that has succeeded so far.
    fn reply(
        &mut self,
        call: &AnyCall<'_>,
        client: &mut dyn Client,
        answer: &mut dyn FnMut(&AnyReply<'_>),
    ) -> Result<(), Error> {
        let answered = match call {
            AnyCall::BasaltDeviceInfo(info) if info.device == 0 => {
                let mut attributes = ATTRIBUTES;
                attributes[PROCESSORS.0] = PROCESSORS.1;
                answer(&AnyReply::BasaltDeviceInfo(BasaltDeviceInfoReply {
                    status: 0,
                    name: List::new(&DEVICE_NAME),
                    total_global_mem: self.total,
                    attributes: List::new(&attributes),
                    takes_code: 1,
                }));
                return Ok(());
            }
            AnyCall::CudaEventElapsedTime(times) => {
                let elapsed = self.events.elapsed(times.start.raw(), times.end.raw());
                elapsed.map(|time| {
                    let ms = time.to_bits();
                    AnyReply::CudaEventElapsedTime(CudaEventElapsedTimeReply { status: 0, ms })
                })
            }
            AnyCall::BasaltModuleGetVariable(asked) => {
                let found = self
                    .modules
                    .get_variable((asked.module.raw(), asked.name), &mut self.memory, client);
                found.map(|(address, size)| {
                    let status = 0;
                    AnyReply::BasaltModuleGetVariable(BasaltModuleGetVariableReply { status, address, size })
                })
            }
            AnyCall::BasaltModuleGetFunction(asked) => {
                return self.modules.kernel(asked.kernel.raw()).map(|(_, kernel)| {
                    let most = usize::try_from(asked.most).unwrap_or(usize::MAX);
                    tell_parameters(kernel, most, answer);
                });
            }
            AnyCall::CudaFuncGetAttributes(asked) => {
                let found = self.modules.kernel(asked.func.raw());
                match found {
                    Ok((module, kernel)) => {
                        tell_attributes(module.program(), kernel, answer);
                        return Ok(());
                    }
                    Err(error) => Err(error),
                }
            }
            other => vectors::ask(other, &self.memory)
                .unwrap_or_else(|| Ok(accel_cuda_null::answer(other, self.memory.used(), self.total))),
        };
        match answered {
            Ok(reply) => {
                answer(&reply);
                Ok(())
            }
            Err(error) => {
                answer(&call.failed(error.code()));
                Err(error)
            }
        }
    }
}

/// Calls whose answers tell nothing of what was computed, so that they do not tell of failures before them.
fn tells(call: &AnyCall<'_>) -> bool {
    !matches!(
        call,
        AnyCall::BasaltDeviceInfo(_)
            | AnyCall::BasaltModuleGetFunction(_)
            | AnyCall::BasaltModuleGetVariable(_)
            | AnyCall::CudaFuncGetAttributes(_)
            | AnyCall::CudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(_)
            | AnyCall::CudaStreamGetPriority(_)
            | AnyCall::CudnnGetConvolutionForwardWorkspaceSize(_)
            | AnyCall::CudnnGetConvolutionBackwardDataWorkspaceSize(_)
            | AnyCall::CudnnGetConvolutionBackwardFilterWorkspaceSize(_)
            | AnyCall::CudnnGetConvolutionForwardAlgorithmV7(_)
            | AnyCall::CudnnGetConvolutionBackwardDataAlgorithmV7(_)
            | AnyCall::CudnnGetConvolutionBackwardFilterAlgorithmV7(_)
            | AnyCall::CudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(_)
            | AnyCall::CudnnGetBatchNormalizationBackwardExWorkspaceSize(_)
            | AnyCall::CudnnGetBatchNormalizationTrainingExReserveSpaceSize(_)
            | AnyCall::CublasLtMatmulAlgoGetHeuristic(_)
    )
}

/// What is carried out even when a kernel has done wrong: questions about the device, and giving back.
fn is_always_carried_out(call: &AnyCall<'_>) -> bool {
    let mut gives_back = matches!(call, AnyCall::BasaltDeviceInfo(_) | AnyCall::CudaFree(_));
    call.effects(&mut |effect, _| gives_back |= matches!(effect, Effect::Drops));
    gives_back
}

fn tell_parameters(kernel: &Kernel, most: usize, answer: &mut dyn FnMut(&AnyReply<'_>)) {
    let parameters = || kernel.parameters.iter().take(most);
    let offsets: Vec<u32> = parameters().map(|parameter| parameter.offset).collect();
    let sizes: Vec<u32> = parameters().map(|parameter| parameter.size).collect();
    answer(&AnyReply::BasaltModuleGetFunction(BasaltModuleGetFunctionReply {
        status: 0,
        count: u32::try_from(kernel.parameters.len()).unwrap_or(u32::MAX),
        size: kernel.parameter_bytes,
        offsets: List::new(&offsets),
        sizes: List::new(&sizes),
    }));
}

/// `cudaFuncAttributes` (CUDA Runtime API): three sizes of eight bytes, then numbers of four.
fn tell_attributes(program: &Program, kernel: &Kernel, answer: &mut dyn FnMut(&AnyReply<'_>)) {
    /// Registers that a thread of a GPU can have.
    const REGISTERS: u32 = 255;
    let (major, minor) = program.version();
    let mut bytes = [0; 144];
    let mut put = |at: usize, number: u32| bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
    // sharedSizeBytes, localSizeBytes
    put(0, kernel.static_shared);
    put(16, kernel.local_bytes);
    // maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion
    put(24, kernel.max_threads.unwrap_or(1024).min(1024));
    put(28, kernel.registers.min(REGISTERS));
    put(32, major * 10 + minor);
    put(36, program.target());
    // maxDynamicSharedSizeBytes
    put(44, (48_u32 << 10).saturating_sub(kernel.static_shared));
    answer(&AnyReply::CudaFuncGetAttributes(CudaFuncGetAttributesReply {
        status: 0,
        attr: List::new(&bytes),
    }));
}
