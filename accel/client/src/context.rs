//! Making contexts (OpenCL API, section 4.4). A new one is what makes a client whose server has died meet the next. Knows no ring.
//!
//! What goes wrong in a context without a call of its own to tell it is not told: `pfn_notify` is taken and never called.

use std::collections::BTreeSet;

use accel_proto::{Callback, List, opencl as calls};

use crate::arguments::{In, Opaque, Out, Ref};
use crate::codes::Code;
use crate::connection::Touched;
use crate::object::{Data, Object};
use crate::{memory, process, returned, status};

/// `pfn_notify` of a context.
type Complaint = extern "C" fn(*const std::ffi::c_char, Opaque, usize, Opaque);

/// `CL_CONTEXT_PLATFORM`, whose value is an object.
const PLATFORM: i64 = 0x1084;

/// Properties as they cross, and as they were given, both with the zero at their end; and the platform among them.
struct Properties<'a> {
    crossing: Option<Vec<i64>>,
    given: Vec<i64>,
    platform: Option<&'a Object>,
}

impl<'a> Properties<'a> {
    /// `platform` is where the value of the platform's key is put, so that it can be borrowed.
    fn of(given: Option<&[i64]>, platform: &'a mut Ref) -> Result<Self, Code> {
        let mut crossing = given.map(<[i64]>::to_vec);
        let pairs = crossing.iter_mut().flat_map(|all| all.as_chunks_mut::<2>().0);
        let mut key = None;
        let mut names = BTreeSet::new();
        for [name, value] in pairs {
            if !names.insert(*name) {
                return Err(Code::INVALID_PROPERTY);
            }
            if *name == PLATFORM {
                *platform = Ref::at(value.cast_unsigned());
                key = Some(value);
            }
        }
        let platform = match key {
            None => None,
            Some(value) => {
                let platform = platform.object::<calls::Platform>()?;
                // A server that has died is met again before names are asked for.
                platform.connection()?;
                *value = platform.raw().into();
                Some(platform)
            }
        };
        Ok(Self {
            crossing,
            given: given.unwrap_or_default().to_vec(),
            platform,
        })
    }
}

/// `clCreateContext`.
pub(crate) extern "C" fn create_context(
    properties: In<i64>,
    num_devices: u32,
    devices: In<Ref>,
    pfn_notify: Option<Complaint>,
    user_data: Opaque,
    errcode_ret: Out<i32>,
) -> Ref {
    returned(errcode_ret, || {
        if pfn_notify.is_none() && !user_data.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let devices = devices.objects::<calls::Device>(num_devices, Code::INVALID_VALUE, Code::INVALID_DEVICE)?;
        let first = devices.objects.first().ok_or(Code::INVALID_VALUE)?;
        let connection = first.connection()?;
        let mut platform = Ref::NULL;
        let properties = Properties::of(properties.terminated(2)?, &mut platform)?;
        let names: Vec<_> = devices.objects.iter().map(|device| device.handle()).collect();
        let parents: Vec<&Object> = devices.objects.iter().copied().chain(properties.platform).collect();
        let made = Object::make::<calls::Context>(connection, &parents, Data::Context(properties.given))?;
        let call = calls::CreateContext {
            properties: properties.crossing.as_deref().map(List::new),
            num_devices,
            devices: Some(List::new(&names)),
            pfn_notify: Callback(0),
            returned: made.handle(),
        };
        let (call, answer) = connection.call(|_| call, &Touched::new(&parents, &[]), false)?;
        answer.success(&call)?;
        Ok(made.publish())
    })
}

/// `clCreateContextFromType`.
pub(crate) extern "C" fn create_context_from_type(
    properties: In<i64>,
    device_type: u64,
    pfn_notify: Option<Complaint>,
    user_data: Opaque,
    errcode_ret: Out<i32>,
) -> Ref {
    returned(errcode_ret, || {
        if pfn_notify.is_none() && !user_data.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let mut platform = Ref::NULL;
        let properties = Properties::of(properties.terminated(2)?, &mut platform)?;
        let connection = match properties.platform {
            Some(platform) => platform.connection()?,
            None => process::process().connection()?,
        };
        let parents: Vec<&Object> = properties.platform.into_iter().collect();
        let made = Object::make::<calls::Context>(connection, &parents, Data::Context(properties.given))?;
        let call = calls::CreateContextFromType {
            properties: properties.crossing.as_deref().map(List::new),
            device_type,
            pfn_notify: Callback(0),
            returned: made.handle(),
        };
        let (call, answer) = connection.call(|_| call, &Touched::new(&parents, &[]), false)?;
        answer.success(&call)?;
        Ok(made.publish())
    })
}

/// `clSetContextDestructorCallback`: this library ends the object, so it calls the function.
pub(crate) extern "C" fn set_context_destructor_callback(
    context: Ref,
    pfn_notify: Option<extern "C" fn(Ref, Opaque)>,
    user_data: Opaque,
) -> i32 {
    status(|| memory::at_the_end(context.object::<calls::Context>()?, pfn_notify, user_data))
}
