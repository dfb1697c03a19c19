//! The control store, from asynchronous code. Knows nothing of what is kept.

use std::sync::Arc;

use control::ControlStore;

use crate::Error;

/// The store, for those who must not block.
#[derive(Clone)]
pub(crate) struct Store(Arc<dyn ControlStore>);

impl Store {
    pub(crate) fn new(store: Arc<dyn ControlStore>) -> Self {
        Self(store)
    }

    /// Does something with it, on a thread that may block.
    pub(crate) async fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn ControlStore) -> Result<T, control::Error> + Send + 'static,
    ) -> Result<T, Error> {
        let store = Arc::clone(&self.0);
        match tokio::task::spawn_blocking(move || work(store.as_ref())).await {
            Ok(done) => Ok(done?),
            Err(error) => Err(Error::Task(error.to_string())),
        }
    }
}
