// Browsers start no workers for pages opened from files, so the search runs in a hidden frame there.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.scope = frame.contentWindow
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      this.scope.importScripts = (...urls) => Promise.all(urls.map((each) => this.load(each)))
      this.ready = this.load(url)
    }

    load(url) {
      const script = this.scope.document.createElement("script")
      script.src = url
      return new Promise((resolve) => {
        script.onload = script.onerror = resolve
        this.scope.document.body.appendChild(script)
      })
    }

    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data })))
    }
  }
}
