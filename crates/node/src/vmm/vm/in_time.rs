//! Questions to a VMM for whoever cannot wait: for others that talk to it, or long for its answer.

use std::time::{Duration, Instant};

use vmm_api::{ClientError, MetricSample, VmmClient};
use wire::packet::PacketError;

use super::Vm;
use crate::Error;

/// How long whoever asks shortly waits for others that do.
const MOMENT: Duration = Duration::from_millis(100);

impl Vm {
    /// Its metrics, for which a tenth of the usual time has to suffice; `None` when somebody else talks to it just now, which
    /// may take long.
    pub(crate) fn metrics_now(&self) -> Option<Result<Vec<MetricSample>, ClientError>> {
        let mut client = self.client_now()?;
        let metrics = client.metrics_by(Instant::now() + self.limits.answer / 10);
        self.let_go(client);
        Some(metrics)
    }

    /// The answer to a short question; `None` when somebody else has talked to it for a moment.
    pub(crate) fn ask_now<T>(
        &self,
        question: impl FnOnce(&mut VmmClient) -> Result<T, ClientError>,
    ) -> Option<Result<T, Error>> {
        let end = Instant::now() + MOMENT;
        // Whoever follows it asks it often, and shortly.
        let client = loop {
            match self.client_now() {
                Some(client) => break client,
                None if Instant::now() > end => return None,
                None => std::thread::sleep(MOMENT / 100),
            }
        };
        Some(self.ask_by(client, self.limits.answer / 10, "it was asked how it is", question))
    }

    /// The same as [`Self::metrics_now`]; `None` also when it does not answer in that time.
    pub(crate) fn metrics_in_time(&self, during: &'static str) -> Result<Option<Vec<MetricSample>>, Error> {
        match self.metrics_now() {
            None => Ok(None),
            Some(Ok(metrics)) => Ok(Some(metrics)),
            Some(Err(ClientError::Packet(PacketError::Late))) => Ok(None),
            Some(Err(error)) => match self.unanswered(during, self.limits.answer / 10, error) {
                Error::Deadline { .. } => Ok(None),
                error => Err(error),
            },
        }
    }
}
