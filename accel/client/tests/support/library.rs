//! The library as a loader has it: opened, asked for its platforms, and called through the dispatch table that its objects begin with.
#![allow(unsafe_code, reason = "what is tested is a library of C functions")]

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// An object.
pub(crate) type Ptr = *const c_void;

/// The order of the table.
const ORDER: &str = include_str!("../../../spec/opencl/icd-order.txt");

/// One test at a time: the library finds its server by the environment, which is the process's.
static ONE: Mutex<()> = Mutex::new(());

/// An instance of the library of its own.
pub(crate) struct Library {
    handle: *mut c_void,
    table: HashMap<&'static str, Ptr>,
    _dir: tempfile::TempDir,
    _one: MutexGuard<'static, ()>,
}

/// A function of the library, by name and type.
#[macro_export]
macro_rules! cl {
    ($library:expr, $name:ident($($argument:ty),*) -> $returns:ty) => {{
        let address = $library.address(stringify!($name));
        // SAFETY: the address is the library's of the function with this name, and the test says its type.
        unsafe { std::mem::transmute::<$crate::support::library::Ptr, extern "C" fn($($argument),*) -> $returns>(address) }
    }};
}

/// Where cargo has put the library that it has built for this test.
pub(crate) fn built() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let found = own.parent().unwrap().join("libbasalt_opencl.so");
    assert!(
        found.exists(),
        "{} is not there; it is built with this test",
        found.display()
    );
    found
}

impl Library {
    /// An instance that finds its server at a socket.
    pub(crate) fn open(socket: &Path) -> Self {
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        // Another file is another instance, with a state of its own.
        let dir = tempfile::tempdir().unwrap();
        let copy = dir.path().join("libopencl.so");
        std::fs::copy(built(), &copy).unwrap();
        // SAFETY: whoever reads the environment meanwhile is the library of this test: there is one at a time.
        unsafe { std::env::set_var("BASALT_ACCEL_SOCKET", socket) };
        let name = CString::new(copy.to_str().unwrap()).unwrap();
        // SAFETY: the name is a string of C.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null(), "dlopen: {}", last_error());
        Self {
            handle,
            table: HashMap::new(),
            _dir: dir,
            _one: one,
        }
    }

    /// A function that is exported, or else one of the table, once there is a platform.
    pub(crate) fn address(&self, name: &str) -> Ptr {
        if let Some(found) = self.table.get(name) {
            return *found;
        }
        let symbol = CString::new(name).unwrap();
        // SAFETY: the handle is open, and the name is a string of C.
        let found = unsafe { libc::dlsym(self.handle, symbol.as_ptr()) };
        assert!(!found.is_null(), "{name} is not exported");
        found
    }

    /// Whether the library itself has a function by that name for others.
    pub(crate) fn exports(&self, name: &str) -> bool {
        let symbol = CString::new(name).unwrap();
        // SAFETY: the handle is open, and the name is a string of C.
        !unsafe { libc::dlsym(self.handle, symbol.as_ptr()) }.is_null()
    }

    /// The platforms, as a loader finds them. From now on functions are those of the table.
    pub(crate) fn platforms(&mut self) -> Result<Vec<Ptr>, i32> {
        let find = cl!(self, clGetExtensionFunctionAddress(*const c_char) -> Ptr);
        let ids = find(c"clIcdGetPlatformIDsKHR".as_ptr());
        assert!(!ids.is_null());
        // SAFETY: the library says that it is this function.
        let ids = unsafe { std::mem::transmute::<Ptr, extern "C" fn(u32, *mut Ptr, *mut u32) -> i32>(ids) };
        let mut count = 0;
        let code = ids(0, ptr::null_mut(), &raw mut count);
        if code != 0 {
            return Err(code);
        }
        let mut platforms = vec![ptr::null(); count as usize];
        assert_eq!(ids(count, platforms.as_mut_ptr(), ptr::null_mut()), 0);
        // SAFETY: an object begins with a pointer to the table (cl_khr_icd).
        let table = unsafe { *platforms[0].cast::<*const Ptr>() };
        let names = ORDER.lines().filter(|line| !line.starts_with('#'));
        let names = names.map(|line| line.split(' ').next().unwrap());
        self.table = names
            .enumerate()
            // SAFETY: the table has an entry for each name.
            .map(|(index, name)| (name, unsafe { *table.wrapping_add(index) }))
            .collect();
        Ok(platforms)
    }

    /// A context with a device and a queue.
    pub(crate) fn ready(&mut self) -> Ready {
        let platform = self.platforms().unwrap()[0];
        let ids = cl!(self, clGetDeviceIDs(Ptr, u64, u32, *mut Ptr, *mut u32) -> i32);
        let mut device = ptr::null();
        assert_eq!(ids(platform, 0xffff_ffff, 1, &raw mut device, ptr::null_mut()), 0);
        let (context, code) = self.context(platform, device);
        assert_eq!(code, 0);
        let queue = self.queue(context, device);
        Ready {
            platform,
            device,
            context,
            queue,
        }
    }

    pub(crate) fn context(&self, platform: Ptr, device: Ptr) -> (Ptr, i32) {
        self.context_of(&[0x1084, platform as i64, 0], device)
    }

    pub(crate) fn context_of(&self, properties: &[i64], device: Ptr) -> (Ptr, i32) {
        let create = cl!(
            self,
            clCreateContext(*const i64, u32, *const Ptr, Ptr, Ptr, *mut i32) -> Ptr
        );
        let mut code = 1;
        let context = create(
            properties.as_ptr(),
            1,
            &raw const device,
            ptr::null(),
            ptr::null(),
            &raw mut code,
        );
        (context, code)
    }

    pub(crate) fn queue(&self, context: Ptr, device: Ptr) -> Ptr {
        let create = cl!(self, clCreateCommandQueue(Ptr, Ptr, u64, *mut i32) -> Ptr);
        let mut code = 1;
        let queue = create(context, device, 0, &raw mut code);
        assert_eq!(code, 0);
        queue
    }

    pub(crate) fn buffer(&self, context: Ptr, flags: u64, size: usize, host: *mut u8) -> Ptr {
        let create = cl!(self, clCreateBuffer(Ptr, u64, usize, *mut u8, *mut i32) -> Ptr);
        let mut code = 1;
        let buffer = create(context, flags, size, host, &raw mut code);
        assert_eq!(code, 0);
        buffer
    }

    /// Puts bytes into a buffer; `waits` for that.
    pub(crate) fn write(&self, queue: Ptr, buffer: Ptr, waits: bool, bytes: &[u8]) -> i32 {
        type Write = extern "C" fn(Ptr, Ptr, u32, usize, usize, *const u8, u32, *const Ptr, *mut Ptr) -> i32;
        let address = self.address("clEnqueueWriteBuffer");
        // SAFETY: as of `cl`.
        let write = unsafe { std::mem::transmute::<Ptr, Write>(address) };
        write(
            queue,
            buffer,
            waits.into(),
            0,
            bytes.len(),
            bytes.as_ptr(),
            0,
            ptr::null(),
            ptr::null_mut(),
        )
    }

    /// Reads bytes of a buffer; without `waits` they come when the queue is finished.
    pub(crate) fn read(&self, queue: Ptr, buffer: Ptr, waits: bool, bytes: &mut [u8]) -> i32 {
        type Read = extern "C" fn(Ptr, Ptr, u32, usize, usize, *mut u8, u32, *const Ptr, *mut Ptr) -> i32;
        let address = self.address("clEnqueueReadBuffer");
        // SAFETY: as of `cl`.
        let read = unsafe { std::mem::transmute::<Ptr, Read>(address) };
        read(
            queue,
            buffer,
            waits.into(),
            0,
            bytes.len(),
            bytes.as_mut_ptr(),
            0,
            ptr::null(),
            ptr::null_mut(),
        )
    }

    pub(crate) fn finish(&self, queue: Ptr) -> i32 {
        cl!(self, clFinish(Ptr) -> i32)(queue)
    }

    /// A program's kernel, whose arguments are a buffer and a number.
    pub(crate) fn kernel(&self, context: Ptr) -> Ptr {
        let create = cl!(
            self,
            clCreateProgramWithSource(Ptr, u32, *const *const c_char, *const usize, *mut i32) -> Ptr
        );
        let mut code = 1;
        let sources = [c"kernel void add".as_ptr(), c"(global uchar *x, uchar y) {}".as_ptr()];
        let program = create(context, 2, sources.as_ptr(), ptr::null(), &raw mut code);
        assert_eq!(code, 0);
        let build = cl!(
            self,
            clBuildProgram(Ptr, u32, *const Ptr, *const c_char, Ptr, Ptr) -> i32
        );
        let options = c"-DN=4".as_ptr();
        assert_eq!(build(program, 0, ptr::null(), options, ptr::null(), ptr::null()), 0);
        let create = cl!(self, clCreateKernel(Ptr, *const c_char, *mut i32) -> Ptr);
        let kernel = create(program, c"add".as_ptr(), &raw mut code);
        assert_eq!(code, 0);
        // The kernel keeps it.
        assert_eq!(cl!(self, clReleaseProgram(Ptr) -> i32)(program), 0);
        kernel
    }

    /// Sets an argument of a kernel.
    pub(crate) fn set(&self, kernel: Ptr, index: u32, bytes: &[u8]) -> i32 {
        let set = cl!(self, clSetKernelArg(Ptr, u32, usize, *const u8) -> i32);
        set(kernel, index, bytes.len(), bytes.as_ptr())
    }

    /// Puts a kernel of 16 times 1 times 1 into a queue, in groups of so many, or as the server likes it.
    pub(crate) fn launch(
        &self,
        (queue, kernel): (Ptr, Ptr),
        dimensions: u32,
        local: Option<usize>,
        event: *mut Ptr,
    ) -> i32 {
        type Launch =
            extern "C" fn(Ptr, Ptr, u32, *const usize, *const usize, *const usize, u32, *const Ptr, *mut Ptr) -> i32;
        let address = self.address("clEnqueueNDRangeKernel");
        // SAFETY: as of `cl`.
        let launch = unsafe { std::mem::transmute::<Ptr, Launch>(address) };
        let size = [16_usize, 1, 1];
        let groups = local.map(|local| [local, 1, 1]);
        let groups = groups.as_ref().map_or(ptr::null(), |groups| groups.as_ptr());
        let (size, none) = (size.as_ptr(), ptr::null());
        launch(queue, kernel, dimensions, none, size, groups, 0, ptr::null(), event)
    }

    pub(crate) fn user_event(&self, context: Ptr) -> Ptr {
        let mut code = 1;
        let event = cl!(self, clCreateUserEvent(Ptr, *mut i32) -> Ptr)(context, &raw mut code);
        assert_eq!(code, 0);
        event
    }
}

// SAFETY: the API's functions may be called by any thread, and the handle is only looked up in.
unsafe impl Sync for Library {}

/// Objects to begin with.
#[derive(Clone, Copy)]
pub(crate) struct Ready {
    pub(crate) platform: Ptr,
    pub(crate) device: Ptr,
    pub(crate) context: Ptr,
    pub(crate) queue: Ptr,
}

// SAFETY: objects of the API are for all threads.
unsafe impl Sync for Ready {}

fn last_error() -> String {
    // SAFETY: dlerror(3) gives a string of C or NULL.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "no reason".into();
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
