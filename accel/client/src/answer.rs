//! What a server has answered to a call. Knows no ring, and no arena.

use accel_proto::{Call, Limits, Reader, Reply};

use crate::codes::Code;

/// A server's answer, as bytes of this process.
#[derive(Debug)]
pub(crate) struct Answer {
    bytes: Vec<u8>,
    limits: Limits,
}

impl Answer {
    pub(crate) fn new(bytes: Vec<u8>, limits: Limits) -> Self {
        Self { bytes, limits }
    }

    /// What it says.
    pub(crate) fn read<'r, 'a, C: Call<'a>>(&'r self, call: &C) -> Result<C::Reply<'r>, Code> {
        let mut reader = Reader::new(&self.bytes, self.limits);
        let reply = <C::Reply<'r> as Reply<'r, C>>::read(&mut reader, call);
        let reply = reply.and_then(|reply| reader.finish().map(|()| reply));
        reply.map_err(|_| Code::OUT_OF_RESOURCES)
    }

    /// The same of a success; its error code otherwise, behind which nothing has to come.
    pub(crate) fn success<'r, 'a, C: Call<'a>>(&'r self, call: &C) -> Result<C::Reply<'r>, Code> {
        let status = self.bytes.first_chunk().map(|bytes| i32::from_le_bytes(*bytes));
        Code::check(status.ok_or(Code::OUT_OF_RESOURCES)?)?;
        self.read(call)
    }
}
