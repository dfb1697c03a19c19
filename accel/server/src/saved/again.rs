//! For tests: a second client with the objects of a first one, by what is saved of that.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::time::Instant;

use super::devices::Devices;
use super::state::{Objects, TRAILER, Writing};
use super::whole::Image;
use super::{Output, Refusal, restore, save};
use crate::session::Client;

/// Bytes of a file.
struct Bytes(Vec<u8>);

impl Output for Bytes {
    fn put(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let at = usize::try_from(at).map_err(io::Error::other)?;
        let end = at + bytes.len();
        self.0.resize(self.0.len().max(end), 0);
        self.0[at..end].copy_from_slice(bytes);
        Ok(())
    }
}

/// What is saved of a client.
pub(crate) struct Kept {
    devices: Devices,
    objects: Objects,
    bytes: Vec<u8>,
}

impl Kept {
    pub(crate) fn of(client: &Client) -> Result<Self, Refusal> {
        let mut output = Bytes(Vec::new());
        let mut file = Writing::new(&mut output, 0);
        let devices = Devices::of(&client.backend).map_err(Refusal::code)?;
        save::drain(client, Instant::now())?;
        let objects = save::objects(client, &devices, &mut file)?;
        // Its end is not looked at here, but there has to be one.
        let length = usize::try_from(TRAILER).unwrap_or_default();
        file.append(&vec![0; length])?;
        Ok(Self {
            devices,
            objects,
            bytes: output.0,
        })
    }

    /// The same as somebody has changed it, if it is a state still.
    pub(crate) fn changed(mut self, change: &mut dyn FnMut(&mut Vec<u8>)) -> Option<Self> {
        let mut json = serde_json::to_vec(&self.objects).ok()?;
        change(&mut json);
        self.objects = serde_json::from_slice(&json).ok()?;
        change(&mut self.bytes);
        Some(self)
    }

    /// A client that is new becomes what it was.
    pub(crate) fn make(&self, new: Client) -> Result<Client, Refusal> {
        let file = tempfile::tempfile()?;
        File::write_all_at(&file, &self.bytes, 0)?;
        let image = Arc::new(Image::new(&file)?);
        let new = new.saved(1, Some(Arc::clone(&image)));
        match restore::objects(&new, &self.objects, &self.devices, &image) {
            Ok(()) => Ok(new),
            Err(refusal) => {
                new.end();
                Err(refusal)
            }
        }
    }
}
