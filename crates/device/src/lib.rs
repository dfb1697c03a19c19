//! How a device is described, created and lives: `DeviceModule`, `DeviceContext`, `Lifecycle`.
