//! The requests of a connection that bytes follow, or that take it for a time: files, trees, ports. Who may, and when; what they do is in
//! files of their own.

use agent_api::Duplex;
use agent_api::message::Request;
use wire::FrameReader;

use super::{Connection, NO_ROOT};
use crate::{Error, copy, files, fs, ports};

impl<S: Duplex + 'static> Connection<'_, '_, S> {
    /// Carries one of them out. Those that change something wait for a freeze, or are refused while it lasts.
    pub(super) fn carry(&mut self, request: Request, reader: &mut FrameReader<S>) -> Result<(), Error> {
        if let Err(error) = self.may_carry(&request) {
            return self.refuse(error.to_string());
        }
        match request {
            Request::Upload(upload) => {
                let target = files::Target::create(&upload);
                files::receive(target, upload.size, reader, self.writer)
            }
            Request::Pack { path, name } => copy::pack(&path, &name, self.writer),
            Request::Unpack {
                path,
                target,
                keep_owner,
            } => copy::unpack(&path, target, keep_owner, reader, self.writer),
            Request::Fs { user, request } => fs::answer(user.as_deref(), &request, reader, self.writer),
            Request::Connect { port } => {
                self.handed_over = ports::serve(port, reader, self.writer)?;
                Ok(())
            }
            _ => self.refuse("this is no request about files or ports".to_owned()),
        }
    }

    fn may_carry(&self, request: &Request) -> Result<(), Error> {
        // An upload needs none: what is to be there before the root is comes by it.
        if !matches!(request, Request::Upload(_)) && !self.has_root() {
            return Err(Error::Refused(NO_ROOT.to_owned()));
        }
        match request {
            Request::Pack { .. } | Request::Connect { .. } => Ok(()),
            Request::Fs { request, .. } if !request.is_change() => Ok(()),
            _ => self.may_start().map(drop),
        }
    }
}
