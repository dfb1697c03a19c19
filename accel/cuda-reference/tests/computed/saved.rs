//! What a client has, saved and made again: it goes on as if nothing had been.

use accel_proto::cuda::*;
use accel_proto::{Handle, Memory, Span, SvmAddress};
use basalt_accel_cuda_reference::{Error, Saved, State};

use crate::device::{Device, copy};
use crate::kernels::{LANGUAGE, args, container, function, launch, load, piece, send, variable};

/// A file: where bytes are in it, and how many.
#[derive(Default)]
pub(crate) struct Bytes(Vec<u8>);

impl Bytes {
    fn put(&mut self, bytes: &[u8]) -> Result<(usize, usize), std::io::Error> {
        let at = self.0.len();
        self.0.extend(bytes);
        Ok((at, bytes.len()))
    }

    fn get(&self, place: (usize, usize)) -> Option<&[u8]> {
        self.0.get(place.0..place.0.checked_add(place.1)?)
    }
}

/// What is saved of a device, as the file's text has it.
pub(crate) fn save(device: &Device) -> (serde_json::Value, Bytes) {
    let mut bytes = Bytes::default();
    let saved: Saved<(usize, usize)> = device.state.save(&mut |part| bytes.put(part)).unwrap();
    (serde_json::to_value(&saved).unwrap(), bytes)
}

/// Another device, of a host that may give so much; what is left of that.
pub(crate) fn restore((saved, bytes): &(serde_json::Value, Bytes), quota: u64) -> Result<Device, Error> {
    let saved: Saved<(usize, usize)> = serde_json::from_value(saved.clone()).unwrap();
    let mut device = Device::with(64 << 20, quota);
    device.state = State::restore(&saved, 64 << 20, &|place| bytes.get(*place), &mut device.host)?;
    Ok(device)
}

fn again(device: &Device) -> Device {
    let again = restore(&save(device), 64 << 20).unwrap();
    assert_eq!(again.host.left, device.host.left, "what is charged is charged again");
    again
}

#[test]
fn memory_streams_and_generators_go_on() {
    let mut device = Device::new();
    let numbers: Vec<u32> = (0..100_000).collect();
    let full = device.upload(&numbers);
    let empty = device.allocate(300_000);
    let stream = Handle::from_raw(4000);
    device
        .put(&AnyCall::CudaStreamCreate(CudaStreamCreate { p_stream: stream }))
        .unwrap();
    let generator = Handle::from_raw(7000);
    let create = AnyCall::CurandCreateGenerator(CurandCreateGenerator {
        generator,
        rng_type: 161,
    });
    assert_eq!(device.status(&create), 0);
    let generate = AnyCall::CurandGenerate(CurandGenerate {
        generator,
        output_ptr: empty,
        num: 1001,
    });
    device.put(&generate).unwrap();
    let mut second = again(&device);
    assert_eq!(second.download::<u32>(full, 100_000), numbers);
    assert_eq!(second.read(empty, 300_000), device.read(empty, 300_000));
    for device in [&mut device, &mut second] {
        device.put(&generate).unwrap();
        let synchronize = AnyCall::CudaStreamSynchronize(CudaStreamSynchronize { stream });
        assert_eq!(device.status(&synchronize), 0);
        let other = Handle::from_raw(4001);
        let synchronize = AnyCall::CudaStreamSynchronize(CudaStreamSynchronize { stream: other });
        assert_eq!(device.status(&synchronize), 400);
        device.free(full);
    }
    assert_eq!(second.read(empty, 4004), device.read(empty, 4004));
    assert_eq!(second.host.left, device.host.left);
}

#[test]
fn events_keep_the_time_between_them() {
    let mut device = Device::new();
    let [start, end, other] = [1, 2, 3].map(Handle::from_raw);
    for event in [start, end, other] {
        device
            .put(&AnyCall::CudaEventCreate(CudaEventCreate { event }))
            .unwrap();
    }
    let stream = Handle::NULL;
    let record = |event| AnyCall::CudaEventRecord(CudaEventRecord { event, stream });
    device.put(&record(start)).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(3));
    device.put(&record(end)).unwrap();
    let mut second = again(&device);
    let elapsed = |device: &mut Device, end| {
        let call = AnyCall::CudaEventElapsedTime(CudaEventElapsedTime { start, end });
        device.ask(&call, |reply| match reply {
            AnyReply::CudaEventElapsedTime(reply) => (reply.status, f32::from_bits(reply.ms)),
            other => (other.status(), 0.0),
        })
    };
    let (before, after) = (elapsed(&mut device, end), elapsed(&mut second, end));
    assert!(
        before.0 == 0 && after.0 == 0 && (before.1 - after.1).abs() < 0.01,
        "{before:?} {after:?}"
    );
    assert_eq!(elapsed(&mut second, other).0, 400, "one that was not recorded");
}

#[test]
fn a_failure_that_nobody_was_told_of_is_told_by_the_second() {
    let mut device = Device::new();
    assert!(device.put(&AnyCall::CudaFree(CudaFree { dev_ptr: 5 })).is_err());
    let mut second = again(&device);
    let told = device.synchronize();
    assert_ne!(told, 0);
    assert_eq!(second.synchronize(), told);
    assert_eq!(
        second.synchronize(),
        device.synchronize(),
        "once, or for ever, as it was"
    );
}

#[test]
fn kernels_are_read_and_variables_are_what_they_were() {
    const COUNTER: u64 = 0x7100_0000_1000;
    let mut device = Device::new();
    load(&mut device);
    variable(&mut device, "table", 0x7100_0000_0000, 16).unwrap();
    variable(&mut device, "counter", COUNTER, 4).unwrap();
    send(&mut device, &container(&[(75, LANGUAGE)]));
    assert_eq!(function(&mut device, 9100, "variables", 8).0, 0);
    let out = device.upload(&[0_f32; 8]);
    launch(&mut device, 9100, (1, 8), &args(&[], &[out])).unwrap();
    let table = device.upload(&[1_f32, 2.0, 3.0, 4.0]);
    let to_table = copy(Memory::Svm(SvmAddress(0x7100_0000_0000)), Memory::Svm(table), 16);
    device.put(&to_table).unwrap();
    let mut second = again(&device);
    for device in [&mut device, &mut second] {
        launch(device, 9100, (1, 8), &args(&[], &[out])).unwrap();
        assert_eq!(function(device, 9101, "variables", 8).0, 0, "its module is there");
        assert_eq!(function(device, 9100, "variables", 8).0, 1, "its name is taken");
    }
    let counter = |device: &mut Device| device.download::<u32>(SvmAddress(COUNTER), 1);
    assert_eq!(counter(&mut second), counter(&mut device));
    assert_eq!(counter(&mut second), [5 + 16 + 16], "it went on");
    assert_eq!(second.download::<f32>(out, 8), device.download::<f32>(out, 8));
    assert_eq!(second.state.used(), device.state.used());
    // What is a variable's was given back before.
    device.free(SvmAddress(COUNTER));
    let mut third = again(&device);
    let [after, before] = [&mut third, &mut device].map(|device| launch(device, 9100, (1, 8), &args(&[], &[out])));
    assert_eq!(
        (after, before.as_ref().map_err(Error::code)),
        (before.clone(), Err(700))
    );
    let mut fourth = again(&device);
    assert_eq!([fourth.synchronize(), fourth.synchronize()], [700, 700], "for ever");
}

#[test]
fn what_a_variable_had_can_be_something_elses() {
    const PLACE: u64 = 0x7100_0000_0000;
    let mut device = Device::new();
    load(&mut device);
    variable(&mut device, "table", PLACE, 16).unwrap();
    send(&mut device, &container(&[(75, LANGUAGE)]));
    assert_eq!(function(&mut device, 9100, "variables", 8).0, 0);
    for size in [8, 16, 32] {
        device.free(SvmAddress(PLACE));
        let call = CudaMalloc { dev_ptr: PLACE, size };
        device.put(&AnyCall::CudaMalloc(call)).unwrap();
        let mut second = again(&device);
        assert_eq!(second.state.used(), device.state.used());
        second.free(SvmAddress(PLACE));
    }
    // A module that is unloaded takes no more of the quota, and leaves its name.
    let (used, module) = (device.state.used(), Handle::from_raw(50));
    let left = device.host.left;
    for _ in 0..3 {
        let index = 0;
        device
            .put(&AnyCall::BasaltModuleLoad(BasaltModuleLoad { module, index }))
            .unwrap();
        let data = BasaltModuleData {
            module,
            offset: 0,
            total: 64,
            count: 64,
            bytes: Span { offset: 0, length: 64 },
        };
        device.put(&AnyCall::BasaltModuleData(data)).unwrap();
        assert_eq!(device.host.left, left - 64);
        device
            .put(&AnyCall::BasaltModuleUnload(BasaltModuleUnload { module }))
            .unwrap();
    }
    assert_eq!((device.state.used(), device.host.left), (used, left));
    let (saved, _) = save(&device);
    assert_eq!(
        saved["modules"]["modules"].as_array().unwrap().len(),
        1,
        "it is not kept"
    );
    again(&device);
}

/// A module whose variables no program has told of, and what its kernel computes.
fn module_of_its_own(device: &mut Device, raw: u32) {
    let bytes = container(&[(75, LANGUAGE)]);
    let module = Handle::from_raw(raw);
    let index = 0;
    device
        .put(&AnyCall::BasaltModuleLoad(BasaltModuleLoad { module, index }))
        .unwrap();
    device.host.arena[..bytes.len()].copy_from_slice(&bytes);
    let length = bytes.len() as u64;
    let data = BasaltModuleData {
        module,
        offset: 0,
        total: length,
        count: length,
        bytes: Span { offset: 0, length },
    };
    device.put(&AnyCall::BasaltModuleData(data)).unwrap();
    let function = AnyCall::BasaltModuleGetFunction(BasaltModuleGetFunction {
        kernel: Handle::from_raw(raw + 100),
        module,
        name: c"variables",
        most: 8,
        reply: Span { offset: 0, length: 0 },
    });
    assert_eq!(device.status(&function), 0);
    let out = device.upload(&[0_f32; 8]);
    launch(device, raw + 100, (1, 8), &args(&[], &[out])).unwrap();
    assert_eq!(device.download::<f32>(out, 4), [9.5, 6.0, 8.25, 16.0]);
}

#[test]
fn variables_have_their_addresses_in_whatever_order_modules_are_made_again() {
    let mut device = Device::new();
    module_of_its_own(&mut device, 1);
    module_of_its_own(&mut device, 2);
    // The first one's table becomes another.
    let (saved, _) = save(&device);
    let regions = saved["memory"].as_array().unwrap().iter();
    let mut tables = regions.filter(|region| region[0].as_u64() >= Some(1 << 56) && region[1] == 16);
    let table = tables.next().unwrap()[0].as_u64().unwrap();
    let numbers = device.upload(&[0_f32, 1.0, 2.0, 3.0]);
    let to_table = copy(Memory::Svm(SvmAddress(table)), Memory::Svm(numbers), 16);
    device.put(&to_table).unwrap();
    let out = device.upload(&[0_f32; 8]);
    let computed = |device: &mut Device| {
        [101, 102].map(|kernel| {
            launch(device, kernel, (1, 8), &args(&[], &[out])).unwrap();
            device.download::<f32>(out, 4)
        })
    };
    let wanted = computed(&mut device);
    assert_ne!(wanted[0], wanted[1]);
    let (mut saved, bytes) = save(&device);
    let place = saved.pointer_mut("/modules/modules").unwrap();
    let mut modules: Vec<serde_json::Value> = serde_json::from_value(place.take()).unwrap();
    let order = modules.clone();
    modules.reverse();
    let orders = [order, modules];
    for modules in orders {
        *saved.pointer_mut("/modules/modules").unwrap() = modules.into();
        let mut again = restore(&(saved.clone(), Bytes(bytes.0.clone())), 64 << 20).unwrap();
        assert_eq!(again.state.used(), device.state.used());
        assert_eq!(computed(&mut again), wanted);
        again.skip(&device);
        module_of_its_own(&mut again, 3);
    }
}

#[test]
fn a_module_that_is_on_its_way_comes() {
    let bytes = container(&[(75, LANGUAGE)]);
    let mut device = Device::new();
    load(&mut device);
    piece(&mut device, 0, bytes.len(), &bytes[..5000]).unwrap();
    let mut second = again(&device);
    assert_eq!(function(&mut second, 9100, "variables", 8).0, 200);
    piece(&mut second, 5000, bytes.len(), &bytes[5000..]).unwrap();
    assert_eq!(function(&mut second, 9100, "variables", 8).0, 0);
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut device = Device::new();
    device.upload(&[1_u8; 1000]);
    let good = save(&device);
    assert!(restore(&good, 1000).is_ok());
    assert_eq!(
        restore(&good, 999).err().map(|error| error.code()),
        Some(2),
        "the quota"
    );
    let changed = |path: &str, value: serde_json::Value| {
        let (mut saved, bytes) = save(&device);
        *saved.pointer_mut(path).unwrap() = value;
        restore(&(saved, bytes), 64 << 20).err()
    };
    let bad: [(&str, serde_json::Value); 8] = [
        ("/memory/0/1", 1001.into()),
        ("/memory/0/0", 0.into()),
        ("/memory/0/0", u64::MAX.into()),
        ("/memory/0/2/0", 1.into()),
        ("/memory/0/2/1", usize::MAX.into()),
        ("/used", 999.into()),
        ("/modules/next", u64::MAX.into()),
        ("/modules/next", 5.into()),
    ];
    for (path, value) in bad {
        let error = changed(path, value.clone());
        assert!(error.is_some(), "{path} {value}");
    }
    let kind = serde_json::json!([["cudaLamp_t", 1]]);
    assert_eq!(changed("/objects", kind).map(|error| error.code()), Some(1));
    let twice = serde_json::json!([["cudaStream_t", 9], ["cudaStream_t", 9]]);
    assert!(changed("/objects", twice).is_some());
}
