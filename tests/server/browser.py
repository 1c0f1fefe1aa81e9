"""Headless Chromium from Debian, driven by its path so that nothing is searched for or downloaded."""

import os
import shutil

CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))


def missing():
    """Returns what is not installed, in words; nothing if a browser can be driven."""
    wanted = {"chromium": CHROMIUM, "chromium-driver": DRIVER}
    names = [package for package, path in wanted.items() if path is None]
    return f"install {' and '.join(names)} (Debian's packages) to test the page" if names else ""


def start(width=1360, height=860, folder=None):
    """Starts a browser with a window of that size. Its downloads go to `folder`."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    os.environ["SE_OFFLINE"] = "true"
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-extensions",
    ):
        options.add_argument(argument)
    options.add_argument("--disable-background-networking")
    options.add_argument(f"--window-size={width},{height}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.add_experimental_option("prefs", {"download.default_directory": str(folder)} if folder else {})
    return webdriver.Chrome(options=options, service=Service(DRIVER))


def resize(browser, width, height, scale=1.0, mobile=False):
    """Sets the size of the viewport itself, because windows of a headless browser are at least 500 pixels wide."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": mobile}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def colours(browser, scheme):
    """Sets the colour scheme that the system prefers: "light" or "dark"."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
