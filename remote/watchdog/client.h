/* The admin's side of the socket: status, stop, retire, replace, reload. One thread, blocks until its
 * deadline. */
#ifndef FS_WATCHDOG_CLIENT_H
#define FS_WATCHDOG_CLIENT_H

#include "remote/watchdog/notify.h"
#include "remote/watchdog/watchdog.h"

/* Each prints for people or programs and returns an exit status. */
int fs_wd_client_status(const char *socket_path, bool json);
/* Waits until the watchdog and its encoder have ended. */
int fs_wd_client_stop(const char *socket_path);
/* This program takes over the process of the running watchdog, with its encoder, leases and channels. */
int fs_wd_client_replace(const char *socket_path);
/* Has it read its settings again; says what is wrong with them. No watchdog is no failure. */
int fs_wd_client_reload(const char *socket_path);

/* Asks the running watchdog to end as soon as it serves nobody, and waits for that, telling a service manager
 * that we live. FS_ECANCELLED at SIGTERM or SIGINT, FS_OK when the place may be free. */
int fs_wd_client_await_place(const char *socket_path, struct fs_notify *n, struct fs_errbuf *e);

#endif
