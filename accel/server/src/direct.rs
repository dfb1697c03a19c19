//! A client of a server in its own process, without a socket and without rings: whoever has it writes into the arena and hands records over,
//! one after the other. For the fuzzer, which has to be fast and must see what is left at the end.
//!
//! Knows no call, and checks nothing: what a record goes through is what it goes through when a ring has brought it.

use std::io;
use std::sync::Arc;

use accel_proto::Record;
use accel_window::{Error, Geometry, Window};

use crate::api::Backend;
use crate::dispatch::Worker;
use crate::session::Client;
use crate::tenant::{Tenant, TenantLimits};

/// Why there is no client.
#[derive(Debug, thiserror::Error)]
pub enum DirectError {
    /// There is no memory for its window.
    #[error("cannot make a client's window of {arena} bytes; give the process more memory or a smaller arena")]
    Window {
        /// Bytes of the arena.
        arena: u64,
        /// Why.
        source: Error,
    },
    /// What measures its commands cannot be made.
    #[error("cannot make a tenant; see whether the arbiter's socket is there")]
    Tenant(#[source] io::Error),
}

/// What a client that has ended has left behind. All of it is zero, or the server has lost something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Left {
    /// Objects that the back end has for the server.
    pub objects: u64,
    /// Bytes that are charged to the quota.
    pub memory: u64,
}

/// A client.
#[derive(Debug)]
pub struct Direct {
    client: Client,
    window: Window,
}

impl Direct {
    /// One with so many bytes of arena, of a back end that has no other client.
    ///
    /// # Errors
    ///
    /// [`DirectError`].
    pub fn new(backend: &Arc<Backend>, limits: &TenantLimits, arena: u64) -> Result<Self, DirectError> {
        let failed = |source| DirectError::Window { arena, source };
        let (_, window) = Window::create(Geometry::new(1, 2, arena).map_err(failed)?).map_err(failed)?;
        let tenant = Tenant::new(limits).map_err(DirectError::Tenant)?;
        Ok(Self {
            // Its calls are kept, as those of sandboxes' clients are.
            client: Client::new(Arc::clone(backend), tenant, Some(window.clone())).saved(0, None),
            window,
        })
    }

    /// One of its threads.
    #[must_use]
    pub fn thread(&self) -> DirectThread<'_> {
        DirectThread {
            worker: Worker::new(&self.client),
        }
    }

    /// Writes into the arena.
    ///
    /// # Errors
    ///
    /// It has not so many bytes there.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.window.slice(offset, bytes.len() as u64)?.write(0, bytes)?;
        Ok(())
    }

    /// Copies out of the arena.
    ///
    /// # Errors
    ///
    /// It has not so many bytes there.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Error> {
        self.window.slice(offset, bytes.len() as u64)?.read(0, bytes)?;
        Ok(())
    }

    /// Bytes that it has of its quota.
    #[must_use]
    pub fn memory(&self) -> u64 {
        self.client.tenant.quota.used()
    }

    /// Ends it: everything that it has is released.
    #[must_use]
    pub fn end(self) -> Left {
        self.client.end();
        let (backend, tenant) = (Arc::clone(&self.client.backend), Arc::clone(&self.client.tenant));
        // What is released by drops, too.
        drop(self);
        Left {
            objects: backend.census.total(),
            memory: tenant.quota.used(),
        }
    }
}

/// What carries out the records of one thread.
#[derive(Debug)]
pub struct DirectThread<'d> {
    worker: Worker<'d>,
}

impl DirectThread<'_> {
    /// Has a record's call carried out: the reply, if the record says that its sender waits.
    pub fn serve(&mut self, record: &Record) -> Option<Record> {
        self.worker.serve(record)
    }

    /// How many records were no calls.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.worker.refused
    }
}
