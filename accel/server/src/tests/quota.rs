//! Memory of a tenant's clients: never more than the quota, whatever they do at a time, and nothing left in the end.

use std::thread;

use super::*;
use crate::api::Code;
use crate::tenant::TenantLimits;

/// Random numbers (xorshift64, Marsaglia 2003).
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

const QUOTA: u64 = 10 << 20;

fn tenant() -> Arc<Tenant> {
    let limits = TenantLimits {
        memory: Some(QUOTA),
        ..TenantLimits::default()
    };
    Tenant::new(&limits).unwrap()
}

fn create(context: Handle<Context>, size: u64, returned: Handle<Mem>) -> CreateBuffer {
    CreateBuffer {
        context,
        flags: 1,
        size,
        host_ptr: None,
        returned,
    }
}

/// Makes and releases buffers under 64 names. The model is what this thread has; that it is told of a failure only when all threads' bytes
/// can be too many is seen by the sum that it may rely on.
fn allocate(tenant: &Arc<Tenant>, seed: u64, rounds: u32) -> u64 {
    let client = client_of(tenant);
    let mut caller = Caller::new(&client);
    caller.context(name(1, 1));
    let mut random = Random(seed);
    let (mut sizes, mut generations, mut held, mut refused) = ([0_u64; 64], [0_u32; 64], 0_u64, 0);
    for _ in 0..rounds {
        let slot = usize::try_from(random.below(64)).unwrap();
        let index = u32::try_from(slot).unwrap();
        if sizes[slot] > 0 {
            let memobj = name(index, generations[slot]);
            assert_eq!(caller.status(&ReleaseMemObject { memobj }), 0);
            held -= sizes[slot];
            sizes[slot] = 0;
        } else {
            let size = 1 + random.below(1 << 20);
            generations[slot] = generations[slot] % 4095 + 1;
            let status = caller.status(&create(name(1, 1), size, name(index, generations[slot])));
            if status == 0 {
                sizes[slot] = size;
                held += size;
            } else {
                assert_eq!(status, Code::MEM_OBJECT_ALLOCATION_FAILURE.0);
                refused += 1;
            }
        }
        let used = tenant.quota.used();
        assert!(held <= used && used <= QUOTA, "{held} are held, {used} are charged");
    }
    drop(caller);
    client.end();
    refused
}

#[test]
fn a_million_allocations_of_four_clients_are_never_over_the_quota() {
    let tenant = tenant();
    let refused: u64 = thread::scope(|scope| {
        let threads: Vec<_> = (1..=4)
            .map(|seed| {
                let tenant = &tenant;
                scope.spawn(move || allocate(tenant, seed * 0x9e37_79b9, 250_000))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(tenant.quota.used(), 0);
    assert!(tenant.quota.most() <= QUOTA && tenant.quota.most() > QUOTA * 9 / 10);
    assert!(refused > 1000 && refused == tenant.quota.refused(), "{refused}");
}

#[test]
fn parts_are_free_and_images_and_pipes_are_not() {
    let tenant = tenant();
    let client = client_of(&tenant);
    let mut caller = Caller::new(&client);
    let (context, _, buffer) = caller.buffer(QUOTA / 2);
    let part = CreateSubBuffer {
        buffer,
        flags: 0,
        buffer_create_type: 0x1220,
        buffer_create_info: Some(BufferRegion { origin: 0, size: 4096 }),
        returned: name(2, 1),
    };
    assert_eq!(caller.status(&part), 0);
    assert_eq!(tenant.quota.used(), QUOTA / 2);
    let mut image = CreateImage2D {
        context,
        flags: 1,
        image_format: Some(ImageFormat {
            image_channel_order: 0x10b5,
            image_channel_data_type: 0x10da,
        }),
        image_width: 1024,
        image_height: 1024,
        image_row_pitch: 0,
        host_ptr: None,
        returned: name(3, 1),
    };
    assert_eq!(caller.status(&image), 0);
    assert_eq!(tenant.quota.used(), QUOTA / 2 + (4 << 20));
    image.returned = name(4, 1);
    assert_eq!(caller.status(&image), Code::MEM_OBJECT_ALLOCATION_FAILURE.0);
    let pipe = CreatePipe {
        context,
        flags: 0,
        pipe_packet_size: 1 << 10,
        pipe_max_packets: 1 << 10,
        properties: None,
        returned: name(5, 1),
    };
    assert_eq!(caller.status(&pipe), Code::MEM_OBJECT_ALLOCATION_FAILURE.0);
    assert_eq!(tenant.quota.used(), QUOTA / 2 + (4 << 20));
    // A part keeps the memory of the whole.
    assert_eq!(caller.status(&ReleaseMemObject { memobj: buffer }), 0);
    assert_eq!(tenant.quota.used(), QUOTA / 2 + (4 << 20));
    assert_eq!(caller.status(&ReleaseMemObject { memobj: name(2, 1) }), 0);
    assert_eq!(tenant.quota.used(), 4 << 20);
    // What is made and cannot be named is released, and so is its charge.
    assert_eq!(caller.status(&create(context, 4096, name(3, 1))), Code::INVALID_VALUE.0);
    assert_eq!(tenant.quota.used(), 4 << 20);
    drop(caller);
    client.end();
    assert_eq!(tenant.quota.used(), 0);
}

#[test]
fn devices_have_no_more_than_the_quota() {
    let tenant = tenant();
    let client = client_of(&tenant);
    let mut caller = Caller::new(&client);
    let (_, device) = caller.device();
    for (param_name, expected) in [(0x101f, QUOTA), (0x1010, QUOTA), (0x1023, 64 << 10)] {
        let info = GetDeviceInfo {
            device,
            param_name,
            param_value_size: 8,
            param_value: true,
            param_value_size_ret: false,
            reply: REPLIES,
        };
        let bytes = caller.ask(&info);
        let reply = GetDeviceInfoReply::read(&mut Reader::new(&bytes, LIMITS), &info).unwrap();
        let value = u64::from_le_bytes(reply.param_value.unwrap().bytes().try_into().unwrap());
        assert_eq!(value, expected, "{param_name:#x}");
    }
}
